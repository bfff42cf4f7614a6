"""Evaluators, metric values, and the weights for evaluation."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer.algorithms import EMA, SWA
from composer.core import (
    Engine,
    Evaluator,
    Event,
    MetricValues,
    State,
    Timestamp,
    ensure_evaluator,
    evaluate_periodically,
    evaluation_weights,
)
from composer.core.evaluator import enter_training_mode, frozen_norms, nearest_metric
from composer.functional import SAMOptimizer


def due_events(evaluate, batches, batches_per_epoch=4):
    """Return where ``evaluate`` is true in a training of that many batches: (event, batch)."""
    state = State(model=None, max_duration=f"{batches}ba")
    due = []

    def is_due(event, later):
        state.previous_timestamp, state.timestamp = state.timestamp, later
        if evaluate(state, event):
            due.append((event.value, int(state.timestamp.batch)))

    for batch in range(1, batches + 1):
        is_due(Event.BATCH_END, state.timestamp.to_next_batch())
        if batch % batches_per_epoch == 0:
            is_due(Event.EPOCH_END, state.timestamp.to_next_epoch())
    is_due(Event.FIT_END, state.timestamp)
    return due


class KeepsDropout(nn.Sequential):
    """A model whose ``train()`` leaves its dropouts in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        return self


class TestEnterTrainingMode:
    """A model trains as after ``model.train()``, except for frozen norms that are in evaluation mode."""

    @pytest.mark.parametrize(
        ("norm", "stays"),
        [
            (nn.BatchNorm1d(2).eval().requires_grad_(False), True),
            (nn.SyncBatchNorm(2).eval().requires_grad_(False), True),
            (nn.InstanceNorm1d(2, affine=True, track_running_stats=True).eval().requires_grad_(False), True),
            (nn.BatchNorm1d(2).eval(), False),
            (nn.BatchNorm1d(2).requires_grad_(False), False),
            (nn.BatchNorm1d(2, affine=False).eval(), False),
            (nn.BatchNorm1d(2, track_running_stats=False).eval().requires_grad_(False), False),
            (nn.LayerNorm(2).eval().requires_grad_(False), False),
        ],
        ids=["batch", "sync", "instance", "trains", "training", "no parameters", "no statistics", "layer"],
    )
    def test_norms(self, norm, stays):
        """Only a norm with statistics that is frozen and in evaluation mode stays in it."""
        model = nn.Sequential(nn.Sequential(norm, nn.Dropout()), nn.Linear(2, 2))
        model[0][1].eval()
        enter_training_mode(model)

        assert [module.training for module in model.modules()] == [True, True, not stays, True, True]
        assert frozen_norms(model) == [norm] * stays

    def test_own_train(self):
        """The model's own ``train()`` decides, also if no module is in evaluation mode before."""
        model = KeepsDropout(nn.Dropout(), nn.Linear(2, 2))
        enter_training_mode(model)

        assert [module.training for module in model] == [False, True]

    def test_report(self, caplog):
        """The number of switched modules is reported once for a model, and nothing if there are none."""
        model = nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False), nn.Dropout(), nn.Linear(2, 2)).eval()
        for each in (model, model.eval(), KeepsDropout(nn.Dropout()).train()):
            enter_training_mode(each)

        (report,) = caplog.messages
        assert report.startswith("3 of the 4 modules of Sequential were in evaluation mode")

    def test_no_report_of_adapters(self, caplog):
        """A model of PEFT has new adapters in training mode beside a base that from_pretrained returned."""
        model = nn.Sequential(nn.Dropout().eval(), nn.Linear(2, 2))
        model.peft_config = {}
        enter_training_mode(model)

        assert (caplog.messages, model[0].training) == ([], True)

    def test_report_of_running_statistics(self, caplog):
        """Frozen norms in training mode are reported once, and norms that train or have no statistics are not."""
        frozen = [nn.BatchNorm1d(2).requires_grad_(False), nn.LayerNorm(2).requires_grad_(False)]
        model = nn.Sequential(*frozen, nn.BatchNorm1d(2), nn.Linear(2, 2))
        for each in (model, model, nn.Sequential(nn.BatchNorm1d(2))):
            enter_training_mode(each)

        (report,) = caplog.messages
        assert report.startswith("1 frozen normalization layers of Sequential update their running statistics")


class TestEvaluatePeriodically:
    def test_fraction_of_the_training(self):
        """It runs twice in the training."""
        assert due_events(evaluate_periodically("0.5dur"), 8) == [("batch_end", 4), ("batch_end", 8)]

    def test_no_evaluation_at_fit_end(self):
        """Without ``eval_at_fit_end`` only the interval is used."""
        assert due_events(evaluate_periodically("3ba", eval_at_fit_end=False), 4) == [("batch_end", 3)]

    def test_zero_disables(self):
        """It never runs, also not at the end."""
        assert due_events(evaluate_periodically(0), 8) == []


class TestEvaluator:
    def test_ensure_evaluator(self):
        """An evaluator is returned unchanged; a loader gets the label "eval" and the default metrics."""
        evaluator = Evaluator(label="a", dataloader=[])

        created = ensure_evaluator([1], ["acc"])

        assert ensure_evaluator(evaluator) is evaluator
        assert (created.label, created.metric_names, created.dataloader.dataloader) == ("eval", ["acc"], [1])


class TestMetricValues:
    def test_metric_name_of_a_single_evaluator(self):
        """The metric's name alone selects the value, as in MosaicML Composer."""
        values = MetricValues(eval={"Accuracy": 0.5})

        assert values["Accuracy"] == values["eval"]["Accuracy"] == values.get("Accuracy") == 0.5
        assert "Accuracy" in values
        assert "Loss" not in values
        assert values.get("Loss", 7) == 7

    def test_ambiguous_metric_name_raises(self):
        """A metric of two evaluators requires a label."""
        values = MetricValues(easy={"Accuracy": 0.9}, hard={"Accuracy": 0.5})

        with pytest.raises(KeyError, match=r"'Accuracy' is a metric of easy, hard: read \['easy'\]\['Accuracy'\]"):
            values["Accuracy"]

    def test_unknown_name_suggests_a_similar_one(self):
        """The error suggests a label or a metric."""
        with pytest.raises(KeyError, match=r"no evaluator or metric 'Acuracy'.*'Accuracy'"):
            MetricValues(eval={"Accuracy": 0.5})["Acuracy"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"label": ""}, ValueError, "label must not be empty"),
        ({"label": 5}, TypeError, "label must be a string, got 5"),
        ({"metric_names": 5}, TypeError, "metric_names must be a string or a list of strings, got 5"),
        ({"metric_names": [5]}, TypeError, r"metric_names must be a string or a list of strings, got \[5\]"),
        ({"subset_num_batches": "2"}, TypeError, "subset_num_batches must be a number of batches.*got '2'"),
        ({"subset_num_batches": 1.5}, TypeError, "subset_num_batches must be a number of batches.*got 1.5"),
        ({"device_eval_microbatch_size": "2"}, TypeError, "device_eval_microbatch_size must be .*got '2'"),
        ({"device_eval_microbatch_size": 0}, ValueError, "device_eval_microbatch_size must be .*got 0"),
    ],
)
def test_bad_arguments(options, kind, message):
    """A value of the wrong type or out of range raises, with the parameter's name."""
    with pytest.raises(kind, match=message):
        Evaluator(**{"label": "eval", "dataloader": [], **options})


class Switching(torch.optim.SGD):
    """Has separate evaluation weights, as schedule-free optimizers do; switching back rounds."""

    def eval(self):
        self._scale(1 / 3, train_mode=False)

    def train(self):
        self._scale(3.0, train_mode=True)

    @torch.no_grad()
    def _scale(self, factor, *, train_mode):
        for group in self.param_groups:
            if group.get("train_mode", True) != train_mode:
                for parameter in group["params"]:
                    parameter.mul_(factor)
            group["train_mode"] = train_mode


@pytest.fixture
def model():
    """A layer whose weights are not multiples of three."""
    return nn.Linear(3, 2, bias=False)


def averaging(algorithm, model, optimizers=()):
    """Return an engine whose algorithm has averaged the model's weights and zeros in equal parts."""
    engine = Engine(State(model, optimizers=optimizers, max_duration="10ba"), algorithms=algorithm)
    trained = model.weight.detach().clone()
    engine.run_event("fit_start")
    for batch, weight in enumerate((torch.zeros_like(trained), trained), start=1):
        nn.init.zeros_(model.weight).data.copy_(weight)
        engine.state.timestamp = Timestamp(batch=batch)
        engine.run_event("batch_end")
    return engine


def averages():
    """Return algorithms that evaluate with the mean of all weights."""
    return [EMA(half_life=None, smoothing=0.5), SWA(swa_start="0ba", swa_end="9ba", update_interval="1ba")]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, SAMOptimizer])
def test_optimizer_with_averages(model, wrap):
    """Such an optimizer evaluates with its averages, also if wrapped; training continues with bit-identical results."""
    optimizer = Switching(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    with evaluation_weights(State(model, optimizers=wrap(optimizer))) as may_differ:
        within = model.weight.detach().clone()

    assert may_differ
    assert torch.equal(within, before * (1 / 3))
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["train_mode"]


@pytest.mark.parametrize("algorithm", averages(), ids=repr)
def test_algorithm_with_averages(model, algorithm):
    """Within the block the model has the averages of EMA or SWA, and afterwards its training weights."""
    state, before = averaging(algorithm, model).state, model.weight.detach().clone()

    with evaluation_weights(state) as may_differ:
        within = model.weight.detach().clone()

    assert may_differ
    assert torch.equal(within, before / 2)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("algorithm", [*averages(), None], ids=repr)
def test_without_averages(model, algorithm):
    """Before averaging starts the training weights are evaluated, and reported as such."""
    before = model.weight.detach().clone()

    with evaluation_weights(State(model, algorithms=algorithm)) as may_differ:
        within = model.weight.detach().clone()

    assert not may_differ
    assert torch.equal(within, before)


@pytest.mark.parametrize("algorithm", averages(), ids=repr)
def test_nested_blocks(model, algorithm):
    """Blocks may be nested, around and within an evaluation by events: the outermost one decides."""
    engine, before = averaging(algorithm, model), model.weight.detach().clone()
    recorded = []

    with evaluation_weights(engine.state):
        engine.run_event("eval_start")
        with evaluation_weights(engine.state):
            recorded.append(model.weight.detach().clone())
        recorded.append(model.weight.detach().clone())
        engine.run_event("eval_end")
        recorded.append(model.weight.detach().clone())
    after = model.weight.detach().clone()
    engine.run_event("eval_start")
    with evaluation_weights(engine.state):
        pass
    recorded.append(model.weight.detach().clone())

    assert all(torch.equal(weights, before / 2) for weights in recorded)
    assert torch.equal(after, before)


@pytest.fixture
def mesh():
    """A device mesh of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_optimizer_of_a_sharded_model(mesh):
    """After an evaluation that leaves weights unsharded, a sharded model uses its training weights."""
    model = nn.Linear(3, 2)
    batch = torch.rand(4, 3)
    before = model(batch).detach()
    bias, weight = model.bias.detach() / 3, model.weight.detach() / 3
    fully_shard(model, mesh=mesh)
    optimizer = Switching(model.parameters(), lr=0.1)

    with torch.no_grad():
        trained = model(batch)
        with evaluation_weights(State(model, optimizers=optimizer)):
            within = model(batch)
        after = model(batch)

    assert torch.equal(trained, before)
    torch.testing.assert_close(within, batch @ weight.T + bias)
    assert torch.equal(after, before)


def test_algorithm_precedes_optimizer(model):
    """If both have averages, those of the algorithm are evaluated, also again after the training."""
    optimizer = Switching(model.parameters(), lr=0.1)
    engine = averaging(EMA(half_life=None, smoothing=0.5), model, SAMOptimizer(optimizer))
    before = model.weight.detach().clone()
    engine.run_event("fit_end")

    for _ in range(2):
        with evaluation_weights(engine.state):
            within = model.weight.detach().clone()
        assert torch.equal(within, before / 2)
        assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", "eval/MulticlassAccuracy"),
        ("val_acc", "eval/MulticlassAccuracy"),
        ("train/accuracy", "train/MulticlassAccuracy"),
        ("validation/MulticlassAccuracy", "eval/MulticlassAccuracy"),
        ("metrics/eval/cross_entropy", "eval/CrossEntropy"),
        ("val_loss", "eval/LossMetric"),
        ("eval/f1", None),
        ("eval/", None),
    ],
)
def test_nearest_metric(name, expected):
    """The metric's name decides, then the label; a label that both have suggests nothing."""
    known = [f"{label}/{one}" for label in ("train", "eval") for one in ("MSE", "MulticlassAccuracy")]

    hint = nearest_metric(name, [*known, "eval/CrossEntropy", "eval/LossMetric"])

    assert hint == ("." if expected is None else f"; did you mean {expected!r}?")


def test_metrics_of_one_evaluator_are_items():
    """Programs for MosaicML Composer iterate over metrics in order; a copy has only what was recorded."""
    values = MetricValues()
    values.record("easy", {"Loss": 1.2, "Accuracy": 0.9})
    assert list(values.items()) == [*zip(values.keys(), values.values(), strict=True)]
    assert list(values.items()) == [("Loss", 1.2), ("Accuracy", 0.9)]
    assert dict(copy.deepcopy(values)) == {"easy": {"Accuracy": 0.9, "Loss": 1.2}}
    values.record("hard", {"Accuracy": 0.5})

    assert list(values.keys()) == ["easy", "hard", "Loss"]
    assert dict(values.items())["Loss"] == 1.2
    assert dict(values) == {"easy": {"Accuracy": 0.9, "Loss": 1.2}, "hard": {"Accuracy": 0.5}}
