"""Studies: arms, pairing, failures, continuing, and wrong arguments."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer.ablation import ablate, experiment
from composer.ablation.experiment import make_arms
from composer.algorithms import EMA, SWA, BlurPool


class TestArms:
    @pytest.mark.parametrize("arms", [["eech"], [["mixup", "emma"]]])
    def test_unknown_names(self, arms):
        """An unknown kind or algorithm is an error with a suggestion."""
        with pytest.raises(ValueError, match=r"did you mean '(each|ema)'"):
            make_arms(arms, ["mixup", "ema"])


class TestResults:
    def test_a_known_gain_is_found(self, study, problem):
        """An algorithm that adds 0.25 to the metric has this difference, and is the recipe."""
        result = study({"nothing": problem.Nothing, "bonus": problem.Bonus}, seeds=3)

        rows = {row.label: row for row in result.rows}
        assert rows["bonus"].difference.mean == pytest.approx(0.25)
        assert rows["nothing"].difference.mean == 0
        assert result.best_recipe() == ("bonus",)

    def test_a_known_cost_is_found(self, study, problem):
        """Nine batches of 50 ms more are measured within 10 %."""
        result = study({"slow": problem.Slow}, arms=["each"], seeds=3)

        seconds = {(run.arm, run.seed): run.seconds for run in result.results}
        errors = [seconds[("slow",), s] - seconds[(), s] - slept for s, slept in problem.SLEPT.items()]
        assert min(map(abs, errors)) < 0.1 * 9 * 0.05  # the least disturbed by other processes

    def test_arguments_of_make_trainer(self, study, problem):
        """A dictionary is passed to make_trainer, and combines with algorithms and other dictionaries."""
        methods = {
            "adam": {"optimizer": torch.optim.Adam},
            "short": {"max_duration": "2ep"},
            "bonus": problem.Bonus,
        }

        def make_trainer(algorithms, seed, optimizer=torch.optim.SGD, **options):
            trainer = problem.make_trainer(algorithms, seed, **options)
            trainer.state.optimizers = [optimizer(trainer.state.model.parameters(), lr=0.1)]
            return trainer

        result = study(methods, arms=["each", "all"], seeds=1, make_trainer=make_trainer)

        final = {run.arm: run.curve[-1][1] for run in result.results}
        assert [len(run.curve) for run in result.results] == [3, 3, 2, 3, 2]
        assert final["bonus",] - final[()] == pytest.approx(0.25)
        assert final["adam", "short", "bonus"] == pytest.approx(
            {run.arm: run.curve[1][1] for run in result.results}["adam",] + 0.25
        )
        assert result.settings.algorithms["short"] == "max_duration='2ep'"

    @pytest.mark.filterwarnings("always")
    def test_warnings_are_below_the_table(self, study, problem):
        """A warning of an arm is in its line, one that the baseline gives, too, only in the baseline's."""

        def make_trainer(algorithms, seed):
            warnings.warn("all runs give\nthis", stacklevel=1)
            return problem.make_trainer(algorithms, seed)

        done = study({"blurpool": BlurPool, "nothing": problem.Nothing}, make_trainer, arms=["each"])

        baseline, blurpool, nothing = done.rows
        assert baseline.warnings == ("all runs give this",)
        assert len(blurpool.warnings) == 1
        assert blurpool.warnings[0].startswith("BlurPool")
        assert nothing.warnings == ()
        for text in (str(done), done.to_markdown()):
            assert "baseline warned: all runs give this" in text
            assert f"blurpool warned: {blurpool.warnings[0]}" in text

    @pytest.mark.filterwarnings("ignore:The training loss is not")  # an error would be reported instead of the NaN
    def test_failures_are_results(self, study, problem):
        """An exception and a NaN are reported with their reasons, and the other arms are measured."""
        result = study({"broken": problem.Broken, "nan": problem.NotANumber}, arms=["each"], seeds=1)

        reasons = {row.label: [reason for _, reason in row.failures] for row in result.rows}
        assert reasons["broken"] == ["RuntimeError: no such luck"]
        assert "loss is nan after 3 batches" in reasons["nan"][0]
        assert result.rows[0].runs == 1

    def test_algorithms_that_conflict(self, study):
        """Two algorithms that cannot work together fail with the engine's sentence; the others are measured."""
        result = study({"ema": lambda: EMA("2ba"), "swa": SWA}, arms=["all"], seeds=1)

        assert "the weights used for evaluation" in dict(result.rows[1].failures)[0]
        assert result.rows[0].runs == 1


class TestMode:
    @pytest.mark.parametrize(("declared", "mode"), [(True, "max"), (False, "min")])
    @pytest.mark.parametrize("prefix", ["", "metrics/"])
    def test_the_metric_declares_it(self, study, problem, declared, mode, prefix):
        """The same values are better or worse, as the metric's higher_is_better declares."""

        def make_trainer(algorithms, seed):
            return problem.make_trainer(algorithms, seed, higher_is_better=declared)

        assert study({}, make_trainer, metric=f"{prefix}eval/Accuracy", seeds=1).settings.mode == mode

    def test_a_loss(self, study):
        """A loss is better if it is smaller."""
        assert study({}, metric="loss/train/total", seeds=1).settings.mode == "min"

    def test_without_a_metric(self, problem, tmp_path):
        """The error lists the metrics of the model."""
        with pytest.raises(ValueError, match=r"metric must be a metric of the model \(.*eval/Accuracy.*got ''"):
            ablate(problem.make_trainer, {}, seeds=1, folder=tmp_path, progress_bar=False)

    def test_a_metric_that_declares_nothing(self, study, problem):
        """The caller has to give it; a study that is continued reads it from its results."""

        def make_trainer(algorithms, seed):
            return problem.make_trainer(algorithms, seed, higher_is_better=None)

        with pytest.raises(ValueError, match="or mode must be 'max' or 'min', got 'eval/Accuracy'"):
            study({}, make_trainer, seeds=1)

        assert study({}, make_trainer, seeds=1, mode="min").settings.mode == "min"
        assert study({}, make_trainer, seeds=1).settings.mode == "min"

    def test_a_contradiction(self, study):
        """The caller's mode is used, with a warning, also for results that were measured with the other."""
        study({}, seeds=1)

        with pytest.warns(UserWarning, match="mode='min' is used, but eval/Accuracy declares the opposite"):
            changed = study({}, seeds=1, mode="min")

        assert changed.settings.mode == "min"
        assert len(changed.results) == 1


class TestPairing:
    def test_batches_and_draws(self, study, problem):
        """Two arms that differ in one algorithm have the same batches, and the same draws of the other algorithm."""
        study({"draws": problem.Draws, "other": problem.OtherDraws}, arms=[["draws"], ["draws", "other"]])

        alone = [seen[1:] for seen in problem.SEEN if seen[0] == ("Draws",)]
        beside = [seen[1:] for seen in problem.SEEN if seen[0] == ("Draws", "OtherDraws")]
        assert alone == beside
        assert len(alone) == 2 * 9
        assert alone[0] != alone[9]


class TestExecutors:
    @pytest.mark.parametrize(("processes", "most"), [(None, 9), (3, 3)])
    def test_pending_runs_are_bounded(self, study, problem, in_this_process, processes, most):
        """An executor gets all runs at once, or as many as ``processes``."""
        pending, numbers = set(), []

        class Counting(in_this_process):
            def submit(self, run, job):
                future = super().submit(run, job)
                pending.add(future)
                numbers.append(len(pending))
                future.add_done_callback(pending.discard)
                return future

        algorithms = {f"nothing {i}": problem.Nothing for i in range(8)}

        study(algorithms, arms=["each"], seeds=1, executor=Counting(), processes=processes)

        assert max(numbers) == most


class TestContinuing:
    def test_runs_with_results_are_not_repeated(self, study, problem):
        """A second call executes only what the first did not: the runs of a new algorithm and of a new seed."""
        first = study({"nothing": problem.Nothing}, arms=["each"])
        second = study({"nothing": problem.Nothing, "bonus": problem.Bonus}, arms=["each"], seeds=3)

        assert second.results[:4] == first.results
        assert len(second.results) == 9

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("duration", r"max_duration \(3ep, now 2ep\)"),
            ("learning rate", r"optimizers/SGD/lr \(0.1, now 0.2\)"),
            ("loss", r"first training loss \(1\.0\d*, now 2\.0\d*\)"),
            ("training data", "first training batches"),
            ("evaluation data", r"first evaluation batches \(\w+, now \w+\)"),
            ("initial weights", "initial weights"),
        ],
    )
    def test_another_training(self, study, problem, tmp_path, change, message):
        """A training with another setting is rejected before it runs, with what differs; also if no run is missing."""

        def make_changed_trainer(algorithms, seed):
            trainer = problem.make_trainer(algorithms, seed, **{"max_duration": "2ep"} if change == "duration" else {})
            model, eval_data = trainer.state.model, trainer.state.evaluators[0].dataloader.dataloader.dataset
            if change == "learning rate":
                trainer.state.optimizers[0].defaults["lr"] = trainer.state.optimizers[0].param_groups[0]["lr"] = 0.2
            if change == "loss":
                model.loss = lambda outputs, batch: 2 * torch.nn.functional.cross_entropy(outputs, batch[1])
            if change == "training data":
                # All samples are changed, whichever are the first.
                trainer.state.train_dataloader.dataset.tensors = (eval_data.tensors[0] + 1e-6, eval_data.tensors[1])
            if change == "evaluation data":
                changed = TensorDataset(eval_data.tensors[0] + 1, eval_data.tensors[1])
                trainer.state.evaluators[0].dataloader.dataloader = DataLoader(changed, batch_size=60)
            if change == "initial weights":
                model.layer.bias.data += 1e-6
            return trainer

        study({}, seeds=1)
        written = (tmp_path / "study" / "results.jsonl").read_bytes()

        with pytest.raises(ValueError, match=rf"results of the same training, but .*: .*{message}.* another folder"):
            study({}, make_changed_trainer, seeds=1)
        assert (tmp_path / "study" / "results.jsonl").read_bytes() == written

    @pytest.mark.parametrize("before", ["two at a time", "another machine"])
    def test_times_stay_rough(self, study, in_this_process, monkeypatch, tmp_path, before):
        """Where some of the stored times are rough, or of another machine, so are those of the continued study."""
        monkeypatch.setattr(experiment, "ThreadPoolExecutor", lambda width: in_this_process())
        with monkeypatch.context() as patch:
            if before == "another machine":
                patch.setattr(experiment.platform, "node", lambda: "another")
            first = study({}, seeds=1, executor=None, processes=2 if before == "two at a time" else None)

        continued = study({}, seeds=2, executor=None)

        assert first.settings.is_rough is (before == "two at a time")
        assert continued.settings.is_rough
        assert not study({}, folder=tmp_path / "new", executor=None).settings.is_rough


class TestWrongArguments:
    def test_a_metric_that_is_not_logged(self, study, problem):
        """The error names what is logged."""
        with pytest.raises(ValueError, match=r"\(eval/Accuracy\) that declares .* got 'eval/Acuracy'"):
            study({"nothing": problem.Nothing}, metric="eval/Acuracy")

    def test_weights_that_are_not_seeded(self, study, problem):
        """The same seed with other initial weights is an error that names the cause, also without other arms."""
        with pytest.raises(ValueError, match="initial weights of baseline with seed 0 differ when it is repeated"):
            study({}, problem.make_unseeded_trainer)

    def test_a_folder_that_is_shared(self, study, problem, tmp_path):
        """A trainer that resumes from the checkpoints of another run is an error that names the remedy."""

        def make_trainer(algorithms, seed):
            folder = str(tmp_path / "shared")
            return problem.make_trainer(algorithms, seed, save_folder=folder, run_name="one", autoresume=True)

        with pytest.raises(ValueError, match="Add a parameter 'folder' to make_trainer and save there"):
            study({"nothing": problem.Nothing}, make_trainer, arms=["each"])

    def test_a_seed_that_is_not_used(self, study, problem):
        """A training that is the same for each seed is an error: its repetitions would seem to be certain."""

        def make_trainer(algorithms, seed):
            trainer = problem.make_trainer(algorithms, seed, train_dataloader=DataLoader(data, batch_size=20))
            trainer.state.model.layer.load_state_dict(weights)
            return trainer

        weights = torch.nn.Linear(4, 3).state_dict()
        data = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)

        with pytest.raises(ValueError, match="must use its seed, but baseline with seeds 0 and 1 has the same"):
            study({"nothing": problem.Nothing}, make_trainer, arms=["each"])

    def test_a_baseline_that_fails(self, study, tmp_path):
        """An error of make_trainer, or in the first batches, is raised and is no result, as there is no comparison."""

        def make_trainer(algorithms, seed):
            raise NameError("no data")

        with pytest.raises(ValueError, match=r"baseline with seed 0 failed .*: NameError: .*log\.txt"):
            study({}, make_trainer)
        assert not (tmp_path / "study" / "results.jsonl").exists()

    def test_a_seed_that_is_not_passed(self, study, problem):
        """A trainer with another seed raises an error."""
        with pytest.raises(ValueError, match=r"must pass its seed to Trainer\(seed=seed\)"):
            study({}, lambda algorithms, seed: problem.make_trainer(algorithms, seed=7))

    def test_algorithms_that_are_not_passed(self, study, problem):
        """A trainer without the arm's algorithms is an error."""
        with pytest.raises(ValueError, match="must pass exactly its algorithms"):
            study({"nothing": problem.Nothing}, lambda algorithms, seed: problem.make_trainer([], seed))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": "best"}, "mode must be one of 'max', 'min'"),
            ({"seeds": 0}, "seeds must be at least one"),
            ({"seeds": [1, 1]}, "different from each other"),
            ({"processes": 0}, "processes must be at least 1, got 0"),
        ],
    )
    def test_values_out_of_range(self, options, message):
        """Each raises with its name before anything runs."""
        with pytest.raises(ValueError, match=message):
            ablate(print, {}, metric="eval/Accuracy", **options)
