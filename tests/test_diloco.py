"""DiLoCo and local SGD in two processes, compared with DDP, with a plain loop and with uninterrupted runs."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, DiLoCo
from composer.core import AlgorithmConflictError, Engine, State
from composer.diagnostics import check_exact_resume
from composer.models import ComposerClassifier
from fixtures.processes import run_processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two processes have found, by rank."""
    folder = tmp_path_factory.mktemp("diloco")
    run_processes(Path(__file__).with_name("diloco_program.py"), 2, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def distances(one, other):
    """Return the largest difference of the weights after each batch."""
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (one, other))
    return [float((first - second).abs().max()) for first, second in zip(*tensors, strict=True)]


class TestSteps:
    """The weights of each process after each of nine batches."""

    def test_of_one_batch_are_those_of_ddp(self, results):
        """Averaged after each step of SGD, weights are those of DDP up to rounding, also in batches of other sizes."""
        for result in results:
            assert max(distances(result["every batch"][0], result["ddp"][0])) < 1e-15
            assert min(distances(result["every third"][0], result["ddp"][0])) > 1e-3

    @pytest.mark.parametrize(("kind", "equal"), [("every third", {3, 6, 9}), ("AdamW", {4, 8})])
    def test_are_equal_after_outer_steps(self, results, kind, equal):
        """After outer steps, and at the end of the training, weights are bit-identical; between them they differ."""
        weights = [result[kind][0] for result in results]

        assert {batch for batch, distance in enumerate(distances(*weights), start=1) if distance == 0} == equal
        assert results[0][kind][1] == results[1][kind][1]

    def test_are_those_of_a_plain_loop(self, results):
        """Two replicas with torch's optimizers, AdamW within and SGD with Nesterov momentum outside, are the same."""
        first, batches = results[0]["AdamW's batches"][0], [result["AdamW's batches"][1] for result in results]
        replicas = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)) for _ in range(2)]
        outer = nn.Parameter(torch.tensor(first, dtype=torch.float64))
        for replica in replicas:
            vector_to_parameters(outer.detach().clone(), replica.double().parameters())
        optimizers = [torch.optim.AdamW(replica.parameters(), lr=0.02) for replica in replicas]
        outer_optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
        found = [[], []]
        for number in range(9):
            for replica, optimizer, of_rank in zip(replicas, optimizers, batches, strict=True):
                inputs, labels = of_rank[number]
                optimizer.zero_grad()
                cross_entropy(replica(torch.tensor(inputs, dtype=torch.float64)), torch.tensor(labels)).backward()
                optimizer.step()
            if number in (3, 7, 8):
                vectors = [parameters_to_vector(replica.parameters()).detach() for replica in replicas]
                outer.grad = outer.detach() - sum(vectors) / 2
                outer_optimizer.step()
                for replica in replicas:
                    vector_to_parameters(outer.detach().clone(), replica.parameters())
            for weights, replica in zip(found, replicas, strict=True):
                weights.append(parameters_to_vector(replica.parameters()).tolist())

        # The recorder has seen the last batch before the outer step of the end, which follows the epoch.
        for weights, result in zip(found, results, strict=True):
            assert max(distances(weights[:8], result["AdamW"][0][:8])) < 1e-12
            assert max(distances(weights[8:], [result["AdamW"][1]])) < 1e-12

    def test_microbatches_make_no_difference(self, results):
        """Microbatches of one sample give the same weights up to rounding."""
        for result in results:
            assert max(distances(result["microbatches"][0], result["every third"][0])) < 1e-14


class TestResume:
    @pytest.mark.parametrize("kind", ["AdamW", "Muon"])
    @pytest.mark.parametrize("batch", [2, 4, 5])
    def test_is_exact_at_any_step(self, results, kind, batch):
        """Stopped by a signal between or after outer steps, each process resumes bit for bit."""
        for result in results:
            weights, end, _ = result[f"{kind}, resumed at {batch}"]

            assert weights == result[kind][0]
            assert end == result[kind][1]

    @pytest.mark.parametrize("batch", [1, 3, 8])
    def test_is_exact_after_stop_training(self, results, batch):
        """Where one process calls stop_training, it takes effect after the next batch, without an outer step."""
        stopped = [result[f"AdamW, stop_training at {batch}"] for result in results]
        for result, (weights, end, _) in zip(results, stopped, strict=True):
            assert weights == result["AdamW"][0]
            assert end == result["AdamW"][1]
        assert stopped[0][2] == stopped[1][2]  # the weights after the last outer step

    def test_in_one_process_is_exact_after_stop_training(self):
        """Also where the call ends the training at once."""

        def make_trainer(**options):
            torch.manual_seed(0)
            model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
            data = TensorDataset(torch.rand(32, 4), torch.arange(32) % 2)
            return Trainer(
                model=model,
                train_dataloader=DataLoader(data, batch_size=4, shuffle=True),
                optimizers=torch.optim.AdamW(model.parameters(), lr=0.1),
                algorithms=[DiLoCo("3ba")],
                max_duration="8ba",
                seed=1,
                device="cpu",
                progress_bar=False,
                **options,
            )

        def stop(trainer):
            trainer.engine.on("batch_end", lambda state, _: state.stop_training(), every="5ba")

        check_exact_resume(make_trainer, stops=["4ba", stop])

    def test_without_the_clock_begins_with_equal_weights(self, results):
        """A training from a checkpoint between outer steps, without its clock, is of equal weights after its own."""
        weights = [result["restarted"][0] for result in results]

        assert [distance == 0 for distance in distances(*weights)] == [False, False, False, True]


def test_communication(results):
    """With an outer step after three batches, a third of the elements is reduced, a third as often as by DDP."""
    for result in results:
        ddp, diloco = result["elements"]["ddp"], result["elements"]["DiLoCo"]

        assert (diloco[0] * 3, diloco[1] * 3) == (ddp[0], ddp[1]) == (9 * 139, 9)
        assert diloco[2] == [3]


def test_evaluation(results):
    """Evaluations use the weights after the last outer step in all processes, and the training goes on with its own."""
    first, second = (result["evaluations"] for result in results)
    for (trained, evaluated, after), *_ in ((first,), (second,)):
        assert after == trained
        assert evaluated[0] != trained[0]  # before the first outer step
        assert evaluated[1:] == trained[1:]
    assert [one[:100] for one in first[1]] == [one[:100] for one in second[1]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("fsdp", "complete in each process"), ("16 bits", "at least 32 bits"), ("divided", "divide_work=True of Muon")],
)
def test_errors(results, kind, message):
    """What needs more communication, or loses small steps, raises an error in all processes."""
    assert all(message in result["errors"][kind] for result in results)


def test_other_averages():
    """A second algorithm that replaces the weights for evaluation is a conflict."""
    state = State(nn.Linear(2, 2), max_duration="4ba")

    with pytest.raises(AlgorithmConflictError, match="DiLoCo"):
        Engine(state, algorithms=[DiLoCo(), EMA()]).run_event("fit_start")


def test_other_weights():
    """Weights that are given to the optimizer during the training raise an error that names one."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    state = State(model, optimizers=optimizer, max_duration="4ba")
    engine = Engine(state, algorithms=[DiLoCo("1ba")])
    engine.run_event("fit_start")
    engine.run_event("batch_start")
    optimizer.add_param_group({"params": [model.bias]})
    state.timestamp = state.timestamp.to_next_batch()

    with pytest.raises(ValueError, match="'bias' was added or removed"):
        engine.run_event("batch_end")
