"""Other packages that prune, where they are installed."""

from __future__ import annotations

import pytest

from dllp.api import train_dense
from dllp.config import Config
from dllp.zoo import small_cnn
from paper import peers
from tests.support.short_runs import DIGITS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", peers.PRUNERS)
def test_torch_pruning_on_digits(name: str) -> None:
    pytest.importorskip("torch_pruning")
    config = Config(keep_flops=0.4, epochs=3, batch_size=64, init="fresh", device="cpu", particles=1)
    trained = train_dense(small_cnn(), DIGITS, Config(epochs=3, batch_size=64, init="fresh", device="cpu", particles=1))
    peer = peers.prune(name, trained.model, DIGITS, config, 3)
    assert 0.3 < peer.kept <= 0.4 and peer.seconds > 0
    test = DIGITS.test
    assert float((peer.result.model.eval()(test.inputs(slice(None))).argmax(1) == test.y).float().mean()) > 0.9
