"""`dllp bench transformers`: transformers and a U-Net against other ways to make them small, at equal training.

For each task and seed one network is trained, or taken as it was published. Every row starts from it: DLLP prunes it in
the course of so many epochs, other methods cut it first and train what is left for as many, and dense it is trained on.
In all of them it teaches. Budgets are shares of the multiply-accumulates of the blocks; streams between blocks, which
all of them read, stay whole. Tests are read once, at the end; `--validation 1` reads the parts for choices instead.
"""
