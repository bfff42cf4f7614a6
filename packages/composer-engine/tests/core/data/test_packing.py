"""Data sets of packed sequences."""

import itertools
import json

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from composer import functional as cf
from composer.core import DataSpec, join_tensors, pack_sequences, split_tensors
from composer.core.data.batches import count_samples, count_tokens

LENGTH = 16
SIZES = torch.randint(1, 40, (90,), generator=torch.Generator().manual_seed(0)).tolist()
DOCUMENTS = [[number] * size for number, size in enumerate(SIZES)]


class Stream(IterableDataset):
    """Documents in order, also after a pickle; a worker has every n-th."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(DOCUMENTS if worker is None else DOCUMENTS[worker.id :: worker.num_workers])


class Resumable(Stream):
    """Documents from a saved place on."""

    def __init__(self):
        self.place, self.read = 0, 0

    def __iter__(self):
        while self.place < len(DOCUMENTS):
            self.place += 1
            self.read += 1
            yield DOCUMENTS[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Given(IterableDataset):
    """The documents that are given, in order."""

    def __init__(self, documents):
        self.documents = documents

    def __iter__(self):
        return iter(self.documents)


def ids_of(rows):
    """Return the ids of rows without padding, sorted."""
    return sorted(token for row in rows for token in row["input_ids"][: row["num_tokens"]].tolist())


def listed(rows):
    """Return rows or batches as lists, which can be compared."""
    return [
        {name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.items()} for row in rows
    ]


class TestBoth:
    @pytest.mark.parametrize("method", ["best_fit", "in_order"])
    @pytest.mark.parametrize("source", [DOCUMENTS, Stream()], ids=["dataset", "stream"])
    def test_each_token_is_in_one_row(self, source, method):
        """An epoch has each token once; parts of a long document are documents."""
        packed = pack_sequences(source, LENGTH, method, buffer_size=20)
        rows = list(packed) if isinstance(packed, IterableDataset) else [packed[row] for row in range(len(packed))]

        assert ids_of(rows) == [token for document in DOCUMENTS for token in document]
        assert all(row["input_ids"].shape == (LENGTH,) for row in rows)
        assert sum(int((row["position_ids"][: row["num_tokens"]] == 0).sum()) for row in rows) == sum(
            -(-size // LENGTH) for size in SIZES
        )

    @pytest.mark.parametrize("source", [DOCUMENTS, Stream()], ids=["dataset", "stream"])
    def test_rows_are_full(self, source):
        """A stream's rows are about as full as those of the complete data."""
        packed = pack_sequences(source, LENGTH, buffer_size=60)
        rows = list(packed) if isinstance(packed, IterableDataset) else [packed[row] for row in range(len(packed))]

        assert sum(SIZES) / (len(rows) * LENGTH) > 0.98

    def test_too_long_documents(self):
        """Long documents are split, truncated or raise an error."""
        document = [list(range(20))]
        split, truncated = (pack_sequences(document, 16, too_long=each) for each in ("split", "truncate"))

        assert sorted(split[row]["num_tokens"] for row in range(len(split))) == [4, 16]
        assert [truncated[row]["input_ids"].tolist() for row in range(len(truncated))] == [list(range(16))]
        with pytest.raises(ValueError, match=r"^dataset\[0\] has 20 tokens, and a row 16\. Set too_long='split' or"):
            pack_sequences(document, 16, too_long="raise")

    def test_labels_and_padding_of_samples(self):
        """Given labels are used, and padding of samples is removed."""
        sample = {"input_ids": [0, 5, 6, 7, 0], "labels": [-100, 1, -100, 7, -100], "attention_mask": [0, 1, 1, 1, 0]}

        row = pack_sequences([sample], 4)[0]

        assert row["input_ids"].tolist() == [5, 6, 7, 0]
        assert row["labels"].tolist() == [-100, -100, 7, -100]

    @pytest.mark.parametrize("name", ["assistant_masks", "completion_mask"])
    def test_masks_of_answers(self, name):
        """Without labels, or with those of all tokens, tokens that Transformers and TRL mark by 0 are no targets."""
        ids, mask = [5, 6, 7, 8], [0, 0, 1, 1]

        for more in ({}, {"labels": ids}):
            row = pack_sequences([{"input_ids": ids, name: mask, **more}], 4)[0]
            assert row["labels"].tolist() == [-100, -100, 7, 8]
        with pytest.raises(ValueError, match=f"{name} must mark each of the 4 tokens, got 2 values"):
            pack_sequences([{"input_ids": ids, name: mask[:2]}], 4)

    @pytest.mark.parametrize("make", [list, Given], ids=["dataset", "stream"])
    def test_documents_without_labels_are_reported(self, make):
        """Masks of zeros in all documents, as of a template without marks, give a warning; one label gives none."""
        documents = [{"input_ids": [5, 6, 7], "assistant_masks": [0, 0, 0]} for _ in range(3)]
        marked = [*documents, {"input_ids": [5, 6], "assistant_masks": [0, 1]}]

        with pytest.warns(UserWarning, match=r"labels of all 3 documents are -100.*no \{% generation %\}"):
            list(pack_sequences(make(documents), 4))
        list(pack_sequences(make(marked), 4))

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "text"),
        [
            (([[1], []], 4), {}, ValueError, r"^dataset\[1\] has no tokens\. Remove empty documents before packing\.$"),
            (([], 4), {}, ValueError, "one document or more"),
            ((["text"], 4), {}, TypeError, r"dataset\[0\] must be token ids.*got str"),
            (([{"text": "a"}], 4), {}, ValueError, r"must have input_ids, got \['text'\]\. Tokenize"),
            (([[0.5, 1.0]], 4), {}, ValueError, "must have whole numbers as input_ids"),
            (([[[1, 2]]], 4), {}, ValueError, r"shape \(n,\)"),
            (
                ([{"input_ids": [1, 2], "labels": [1]}], 4),
                {},
                ValueError,
                "of the same shape, got torch.int64 of shape",
            ),
            ((iter([[1]]), 4), {}, TypeError, "iterable more than once, got list_iterator"),
            ((3, 4), {}, TypeError, "got int"),
            (([[1]], 0), {}, ValueError, "length must be at least 1, got 0"),
            (([[1]], 4, "worst_fit"), {}, ValueError, "method must be one of 'best_fit', 'in_order', got 'worst_fit'"),
            (([[1]], 4), {"too_long": "drop"}, ValueError, "too_long must be one of"),
            (([[1]], 4), {"lengths": [1, 2]}, ValueError, "lengths a number for each, got 1 and 2"),
            ((Stream(), 4), {"lengths": [1]}, ValueError, "lengths must be None"),
            ((Stream(), 4), {"buffer_size": 0}, ValueError, "buffer_size must be at least 1"),
        ],
    )
    def test_bad_input(self, arguments, options, error, text):
        """Bad data and settings raise an error at construction."""
        with pytest.raises(error, match=text):
            pack_sequences(*arguments, **options)


class TestDataset:
    def test_plan_depends_on_seed_and_epoch(self):
        """Each epoch has other rows, as many as before, and a seed and an epoch always the same ones."""
        packed = pack_sequences(DOCUMENTS, LENGTH)
        epochs = []
        for epoch in (0, 1, 0):
            packed.set_epoch(epoch)
            epochs.append(listed(packed[row] for row in range(len(packed))))

        assert epochs[0] == epochs[2] != epochs[1]
        assert len(epochs[0]) == len(epochs[1])
        assert listed([pack_sequences(DOCUMENTS, LENGTH, seed=1)[0]]) != epochs[0][:1]

    def test_inside_of_other_data_sets(self):
        """The epoch is passed on through data sets of torch, which do not have the method."""
        packed = pack_sequences(DOCUMENTS, LENGTH)
        flipped = cf.AlternatingFlip(Subset(packed, range(len(packed))), key="input_ids")
        outer = pack_sequences(ConcatDataset([Subset(packed, [0]), packed]), LENGTH, lengths=[1] * (1 + len(packed)))

        for epoch, one in enumerate((flipped, outer), start=3):
            one.set_epoch(epoch)
            assert packed.epoch == epoch

    def test_given_lengths_save_loading(self):
        """With lengths, documents are loaded with their rows only, and other lengths raise."""

        class Counted(list):
            loads = 0

            def __getitem__(self, index):
                self.loads += 1
                return super().__getitem__(index)

        source = Counted(DOCUMENTS)
        packed = pack_sequences(source, LENGTH, lengths=SIZES)

        assert source.loads == 0
        assert listed([packed[3]]) == listed([pack_sequences(DOCUMENTS, LENGTH)[3]])
        with pytest.raises(ValueError, match=r"dataset\[0\] has 2 tokens, and the rows were planned for 3"):
            pack_sequences([[1, 2]], LENGTH, lengths=[3])[0]


class TestStream:
    @pytest.mark.parametrize("source", [Stream, Resumable])
    @pytest.mark.parametrize("stop", [0, 1, 17, 40, 60, "end"])
    def test_continues_exactly(self, source, stop):
        """From a state that was saved as data after any row, the other rows are the same ones."""
        whole = listed(pack_sequences(source(), LENGTH, buffer_size=25))
        stop = len(whole) if stop == "end" else stop
        stream = pack_sequences(source(), LENGTH, buffer_size=25)
        reading = iter(stream)
        first = listed(itertools.islice(reading, stop))
        data, tensors = split_tensors(stream.state_dict())

        later = pack_sequences(source(), LENGTH, buffer_size=25)
        later.load_state_dict(join_tensors(json.loads(json.dumps(data)), tensors))
        rest = listed(later)

        assert first + rest == whole
        assert listed(later) == whole  # the state applies to one iteration

    @pytest.mark.parametrize("source", [Stream, Resumable])
    def test_an_iteration_that_ends_early_leaves_no_place(self, source):
        """If the rest is not read, the state is the beginning, as the next iteration starts there."""
        stream = pack_sequences(source(), LENGTH, buffer_size=25)
        first, beginning = next(iter(stream)), str(stream.state_dict())
        reading = iter(stream)
        again, middle = next(reading), stream.state_dict()
        stream.load_state_dict(middle)
        del reading  # closed after another place was loaded

        assert beginning == str(pack_sequences(source(), LENGTH).state_dict()) != str(middle)
        assert listed([first]) == listed([again])
        assert str(stream.state_dict()) == str(middle)

    def test_a_source_that_counts_its_epochs(self):
        """The state between two epochs has that of the source, which decides what the next one reads."""

        class Shuffled(Resumable):
            epoch = 0

            def __iter__(self):
                order = DOCUMENTS[self.epoch :] + DOCUMENTS[: self.epoch]
                while self.place < len(order):
                    self.place += 1
                    yield order[self.place - 1]
                self.epoch, self.place = self.epoch + 1, 0

            def state_dict(self):
                return {"place": self.place, "epoch": self.epoch}

            def load_state_dict(self, state):
                self.place, self.epoch = state["place"], state["epoch"]

        stream = pack_sequences(Shuffled(), LENGTH, buffer_size=25)
        first, between = listed(stream), stream.state_dict()
        stream.set_epoch(1)
        second = listed(stream)
        later = pack_sequences(Shuffled(), LENGTH, buffer_size=25)
        later.load_state_dict(between)
        later.set_epoch(1)

        assert first != second == listed(later)

    def test_epochs_differ(self):
        """Another epoch has another order and starts at its beginning, the same one continues."""
        stream = pack_sequences(Stream(), LENGTH)
        epochs = [listed(stream)]
        state = stream.state_dict()
        stream.set_epoch(1)
        epochs.append(listed(stream))
        reading = iter(stream)
        next(reading)
        middle = stream.state_dict()
        stream.load_state_dict(middle)
        stream.set_epoch(1)
        rest = listed(stream)
        stream.load_state_dict(state)
        stream.set_epoch(1)

        assert epochs[0] != epochs[1] == listed(stream)
        assert rest == epochs[1][1:]

    def test_documents_that_fit_nowhere_do_not_wait_forever(self):
        """If no two documents fit into a row, half of the rows of a buffer are returned."""

        class Large(IterableDataset):
            def __iter__(self):
                return iter([[number] * 10 for number in range(100)])

        stream = pack_sequences(Large(), LENGTH, buffer_size=10)
        assert [row["num_tokens"] for row in stream] == [10] * 100
        reading = iter(stream)
        next(reading)
        assert len(stream.state_dict()["waiting"]["lengths"]) <= 10

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's own
    @pytest.mark.parametrize(("source", "workers"), [(Stream, 0), (Stream, 2), (Resumable, 0)])
    def test_stateful_loader_resumes_exactly(self, source, workers):
        """A StatefulDataLoader of saves and restores the stream in its workers."""
        loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

        def load():
            stream = pack_sequences(source(), LENGTH, buffer_size=25)
            return loaders.StatefulDataLoader(stream, 4, num_workers=workers, collate_fn=cf.collate_packed)

        whole = listed(load())
        loader = load()
        first = listed(itertools.islice(loader, 7))
        state = loader.state_dict()
        later = load()
        later.load_state_dict(state)

        assert first + listed(later) == whole


class TestCounts:
    def test_tokens_are_counted_without_padding(self):
        """A packed batch counts its documents' tokens, and its rows as samples, in each microbatch."""
        packed = pack_sequences(DOCUMENTS, LENGTH)
        loader = DataLoader(packed, batch_size=len(packed), collate_fn=cf.collate_packed)
        [batch] = loader
        spec = DataSpec(loader)

        assert spec.get_num_tokens_in_batch(batch) == count_tokens(batch) == sum(SIZES) < batch["input_ids"].numel()
        assert count_samples(batch) == len(packed)
        for size in (1, 2, 5):
            parts = spec.split_batch(batch, size)
            assert sum(map(count_tokens, parts)) == sum(SIZES)
            assert [*itertools.chain(*(part["document_lengths"] for part in parts))] == batch["document_lengths"]
        shorter = cf.set_batch_sequence_length(batch, 4)
        assert count_tokens(shorter) == sum(min(4, sum(row)) for row in batch["document_lengths"])


def test_persistent_workers_receive_the_epoch():
    """The rows of a later epoch come from workers that began in an earlier one, as from the data set itself."""
    packed = pack_sequences([{"input_ids": one} for one in DOCUMENTS], 64, too_long="truncate")
    loader = DataLoader(packed, batch_size=4, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in range(2):
        packed.set_epoch(epoch)
        epochs.append([batch["input_ids"] for batch in loader])
    expected = [batch["input_ids"] for batch in DataLoader(packed, batch_size=4)]

    assert all(map(torch.equal, epochs[1], expected))
    assert not all(map(torch.equal, epochs[0], expected))
