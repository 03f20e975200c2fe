"""A user's own DataLoader: batches that depend on seed and epoch alone, and one line for every mistake."""

import multiprocessing

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from dllp.data import LoaderBatches, from_pair
from dllp.errors import DataError
from tests.support import pictures


def loader(**options) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(20, 3, 4, 4), torch.arange(20) % 4), batch_size=8, **options)


@pytest.mark.parametrize("own", [None, torch.Generator()])
def test_loader_batches_depend_on_seed_and_epoch_alone(own):
    source = LoaderBatches(loader(shuffle=True, generator=own), seed=1, channels_last=True)
    assert (source.steps, source.num_examples) == (3, 20)
    torch.manual_seed(5)
    first = list(source.epoch(2))
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
    rest = list(source.epoch(2, start_step=1))
    assert len(rest) == 2
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first[1:], rest, strict=True))
    assert not torch.equal(first[0][0], next(source.epoch(3))[0])
    assert first[0][0].is_contiguous(memory_format=torch.channels_last)


class Drawn(Dataset):
    """Every example is drawn where it is loaded, as a transform does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3), i % 2


def test_workers_that_live_on_are_seeded_for_every_epoch():
    """An epoch is the same after any others and from any step; the user's own workers stay what they are."""
    kept = DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    assert len(list(kept)) == 3
    own = set(multiprocessing.active_children())
    source = LoaderBatches(kept, seed=1)
    first = [list(source.epoch(k)) for k in range(2)]
    next(source.epoch(0))  # left early, as by a run that is stopped
    assert pictures.same(list(source.epoch(1)), first[1]) and pictures.same(list(source.epoch(0)), first[0])
    assert pictures.same(list(LoaderBatches(kept, seed=1).epoch(1, start_step=1)), first[1][1:])
    assert not torch.equal(first[0][0][0], first[1][0][0])
    assert set(multiprocessing.active_children()) == own and len(list(kept)) == 3
    plain = DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=2)
    assert pictures.same(list(LoaderBatches(plain, seed=1).epoch(1)), first[1])


def test_loader_tells_its_sampler_the_epoch():
    class Sampler(torch.utils.data.SequentialSampler):
        seen = -1

        def set_epoch(self, epoch: int) -> None:
            self.seen = epoch

    sampler = Sampler(range(20))
    list(LoaderBatches(loader(sampler=sampler), seed=0).epoch(4))
    assert sampler.seen == 4


def test_examples_that_a_sampler_never_draws_do_not_count():
    """N weighs prior and repulsion: it is the part that a run learns from, as where data are split by samplers."""
    part = SubsetRandomSampler(range(4, 17))
    assert LoaderBatches(loader(sampler=part), seed=0).num_examples == 13
    data = TensorDataset(torch.zeros(20, 1), torch.zeros(20).long())
    batches = DataLoader(data, batch_sampler=BatchSampler(part, 5, drop_last=True))
    assert LoaderBatches(batches, seed=0).num_examples == 13


def test_loader_settles_types():
    pairs = TensorDataset(torch.full((2, 1), 255, dtype=torch.uint8), torch.ones(2, dtype=torch.float64))
    x, y = next(LoaderBatches(DataLoader(pairs, batch_size=2), seed=0).epoch(0))
    assert x.dtype == y.dtype == torch.float32 and x.tolist() == [[1], [1]] and y.shape == (2, 1)
    maps = torch.randn(2, 3, 5, 2).permute(0, 3, 1, 2)
    permuted = DataLoader([0, 1], batch_size=2, collate_fn=lambda _: (torch.zeros(2, 1), maps))  # type: ignore[arg-type]
    assert torch.equal(next(LoaderBatches(permuted, seed=0).epoch(0))[1], maps.flatten(1))


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_labels_of_a_loader_are_those_of_a_pair(kind, shape):
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]).to(kind).view(shape)
    found = next(LoaderBatches(DataLoader(TensorDataset(x, y), batch_size=4), seed=0, num_classes=2).epoch(0))[1]
    for labels in (found, from_pair(x, y).y):
        assert labels.dtype == torch.int64 and labels.tolist() == [0, 1, 1, 0]


def test_batches_that_the_data_set_makes_itself_are_counted_by_their_examples():
    batches = [(torch.zeros(5, 2), torch.arange(5) % 2)] * 3
    source = LoaderBatches(DataLoader(batches, batch_size=None), seed=0)  # type: ignore[arg-type]
    assert (source.steps, source.num_examples) == (3, 15)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TensorDataset(torch.zeros(4, 1), torch.full((4,), 9)), "label 9 in batch 0 of the DataLoader"),
        (TensorDataset(torch.full((4, 1), torch.nan), torch.zeros(4).long()), "NaN"),
    ],
)
def test_bad_loaders(dataset, message):
    source = LoaderBatches(DataLoader(dataset, batch_size=2), seed=0, num_classes=3)
    with pytest.raises(DataError, match=message):
        list(source.epoch(0))


def test_loaders_without_length_or_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1), 0

    with pytest.raises(DataError, match="has no length"):
        LoaderBatches(DataLoader(Stream()), seed=0)
    with pytest.raises(DataError, match="yields no batch"):
        LoaderBatches(DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=4, drop_last=True), seed=0)

    class Short(DataLoader):
        def __len__(self) -> int:
            return 5

    short = Short(TensorDataset(torch.zeros(2, 1), torch.zeros(2).long()))
    with pytest.raises(DataError, match="ended at batch 2 of 5"):
        list(LoaderBatches(short, seed=0).epoch(0))
    uneven = DataLoader([0], collate_fn=lambda _: (torch.zeros(2, 1), torch.zeros(3)))
    with pytest.raises(DataError, match="2 inputs but 3 labels"):
        list(LoaderBatches(uneven, seed=0).epoch(0))
