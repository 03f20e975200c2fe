"""What the end of each command's help shows."""

from __future__ import annotations

from dllp import zoo

PRUNE = f"""networks by name: {", ".join(zoo.names())}

examples:
  dllp prune --data digits --model small_cnn --keep-flops 0.2 --out runs/demo
      two small networks on embedded data, each at a fifth of the original's cost
  dllp prune --data cifar10 --model resnet56 --keep-flops 0.45 --lr 0.4 --precision bfloat16 --out runs/resnet56
  dllp prune --data photos --model my_package.nets:trained --keep-params 0.3 --epochs 30 --out runs/mine
      images in photos/train/<class>/ and photos/test/<class>/, a trained network from your own function
  dllp prune --data imagenet --image-size 224 --workers 16 --model resnet50 --init resnet50.safetensors \\
             --preset short --keep-flops 0.34 --out runs/imagenet
      a folder of any size, decoded by 16 processes; trained weights, and the schedule of a short run
  dllp prune --config runs/demo/config.yaml --out runs/again
      the same run once more; options beside --config win over the file
  dllp prune --method fpgm --keep-flops 0.45 --finetune-epochs 10 --out runs/fpgm
      another method, to the same budget; `dllp methods` lists them
  torchrun --nproc-per-node 2 -m dllp prune --particles 2 --parallel particles --out runs/two
      a process for each particle; --parallel data shares batches instead, on any number of devices and hosts
  dllp prune --resume --out runs/demo
      goes on with a run that was stopped or killed, to the same result

defaults (*): digits has 30 epochs; fewer than 10,000 training examples are taken in batches of 64; floating-point
targets make a regression; a network by name starts fresh, one of your own as it is given, and `--init FILE` starts from
trained weights. `--preset paper` and `--preset short` bring their own epochs, rates and start. Names may be written
with dashes or underscores, here and in files."""
EVALUATE = """examples:
  dllp evaluate runs/demo
  dllp evaluate runs/demo --corrupt gaussian-blur:1,2,3 sharpen noise:0.1 --json robustness.json
  dllp evaluate runs/demo --ood noise folder/of/photos
      how well doubt tells the test set from inputs that the network was never made for
  dllp evaluate runs/mine --model my_package.nets:trained --data other_photos --subset 0.2"""
BENCH = """Results lie in DIR/NAME: runs.jsonl (a line for each finished job), summary.json, table.md,
and test probabilities. Finished jobs are never run again: the same command goes on where it was interrupted.

examples:
  dllp bench table1 --data-root data
      every row with its own number of seeds (five for the headline, three elsewhere)
  dllp bench table1 --rows dense 'dllp-channel-*' --seeds 0 1 2 --list
      what would be run, and what is finished
  dllp bench table2 --shard 1/2 & dllp bench table2 --shard 2/2; wait
      two processes share the work
  dllp bench table2 --launcher local --jobs 4
      four processes that take the next job when they are free
  dllp bench table2 --launcher ray --address head:6379
      the nodes of a Ray cluster, a GPU for each job; jobs of a lost node go to others; pip install 'dllp[ray]'
  dllp bench table3 --data imagenet --image-size 224 --out results-imagenet
      ResNet-50 on a folder of your own, train/<class>/*.jpg and val/<class>/*.jpg, streamed where it is large
  dllp bench figure3; dllp bench figure4; dllp bench reliability
      what pruned networks doubt; runs that another bench has finished are taken over
  dllp bench table1 --validation 5000 --epochs 20 --rows dllp-channel-55 --seeds 0
      a choice of hyperparameters: trained on 45,000 images, evaluated on the 5,000 others, in a folder of its own
  dllp bench table1 --validation 5000 --epochs 30 --rows 'tuned-slimming-*' --set network=resnet20 strength=1e-5
      the same with another network, and another strength than the method's own"""
EXPORT = """Needs pip install 'dllp[onnx]' for ONNX. The file is checked against PyTorch before it is written.

examples:
  dllp export runs/demo --format onnx --out demo.onnx
      the first particle: float32 images, normalised as in training, to logits
  dllp export runs/demo --posterior --uint8 --out demo.onnx
      raw images to prediction, aleatoric and epistemic doubt, all particles in one graph
  dllp export runs/demo --pad-to 8 --out demo.onnx
      dead channels up to multiples of 8: the same outputs, often much faster in onnxruntime"""
REPORT = """Needs pip install 'dllp[report]'. The page holds everything: it opens from a file and asks for
nothing. Latency is what `dllp speed` found before, or is measured briefly; corruptions are shown where
`dllp evaluate --corrupt` was run.

examples:
  dllp report runs/demo
      writes runs/demo/report.html
  dllp report runs/a runs/b runs/c --out comparison.html
      accuracy against FLOPs with the Pareto front, and where the settings differ"""
SPEED = """Needs pip install 'dllp[onnx]'. Networks take turns, so that all see the same machine.

examples:
  dllp speed runs/demo
  dllp speed runs/demo --batch 1 16 64 --round-to 16 --json speed.json"""
ANALYZE = """examples:
  dllp analyze runs/demo
  dllp analyze runs/demo --particle 2 --json shapes.json
      every figure, every fit, and the densities for plots"""
