"""Studies: arms, pairing, failures, continuing, and wrong arguments."""

import json
import multiprocessing

import pytest

from composer.ablation import Study, ablate
from composer.ablation.experiment import make_arms
from composer.algorithms import EMA, SWA


class TestArms:
    def test_each_kind(self):
        """Each kind gives its arms, the baseline is the first, and no arm is measured twice."""
        found = make_arms(["each", "leave_one_out", "all", ["c", "a"]], ["a", "b", "c"])

        assert found.fixed == [(), ("a",), ("b",), ("c",), ("b", "c"), ("a", "c"), ("a", "b"), ("a", "b", "c")]
        assert not found.greedy

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


class TestPairing:
    def test_batches_and_draws(self, study, problem):
        """Two arms that differ in one algorithm have the same batches, and the same draws of the other algorithm."""
        study({"draws": problem.Draws, "other": problem.OtherDraws}, arms=[["draws"], ["draws", "other"]])

        alone = [seen[1:] for seen in problem.SEEN if seen[0] == ("Draws",)]
        beside = [seen[1:] for seen in problem.SEEN if seen[0] == ("Draws", "OtherDraws")]
        assert alone == beside
        assert len(alone) == 2 * 9
        assert alone[0] != alone[9]

    def test_an_algorithm_may_change_the_data(self, study, problem, monkeypatch):
        """Other first batches are no error where a repetition of the baseline has its batches again."""

        class Reversed(problem.Nothing):
            def match(self, event, state):
                return True

        def make_trainer(algorithms, seed):
            return problem.make_trainer(algorithms, seed, **({"train_subset_num_batches": 1} if algorithms else {}))

        assert not any(row.failures for row in study({"reversed": Reversed}, make_trainer).rows)


class TestGreedy:
    def test_the_best_is_added(self, study, problem):
        """The search adds what helps, and stops when nothing else does."""
        result = study({"nothing": problem.Nothing, "bonus": problem.Bonus}, arms=["greedy"])

        assert [row.label for row in result.rows] == ["baseline", "nothing", "bonus", "nothing + bonus"]
        assert result.best_recipe() == ("bonus",)


class TestBudget:
    def test_worse_arms_are_stopped(self, study, problem):
        """Where the time is not sufficient for all, the worse half stops after a seed, and the table states it."""
        algorithms = {"bonus": problem.Bonus, "slow": problem.Slow, "nothing": lambda: problem.Slow(0.1)}

        result = study(algorithms, arms=["each"], seeds=8, budget=3)

        runs = {row.label: row.runs for row in result.rows}
        assert runs["bonus"] == runs["baseline"] > runs["nothing"]
        assert "stopped early to stay within the budget, after 1 of 8 seeds" in str(result)


class TestContinuing:
    def test_killed_five_times(self, problem, study, tmp_path):
        """A study that SIGKILL ends five times has the results of one without interruption."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["composer.ablation", "torch._dynamo", "scipy.stats"])
        path = tmp_path / "killed" / "results.jsonl"
        for _ in range(5):
            # A run has nine batches: the process is killed in the second run with this algorithm.
            process = context.Process(target=problem.run_slow_study, args=(path.parent, 14))
            process.start()
            process.join()
            assert process.exitcode == -9

        problem.run_slow_study(path.parent)
        problem.run_slow_study(tmp_path / "uninterrupted")

        def table(folder):
            values = {(run.arm, run.seed): [value for _, value in run.curve] for run in Study.load(folder).results}
            return values, [(row.label, row.metric, row.difference, row.adjusted_p) for row in Study.load(folder).rows]

        assert table(path.parent) == table(tmp_path / "uninterrupted")

    def test_runs_with_results_are_not_repeated(self, study, problem):
        """A second call executes only what the first did not: the runs of a new algorithm and of a new seed."""
        first = study({"nothing": problem.Nothing}, arms=["each"])
        second = study({"nothing": problem.Nothing, "bonus": problem.Bonus}, arms=["each"], seeds=3)

        assert second.results[:4] == first.results
        assert len(second.results) == 9

    def test_the_rest_of_a_line_is_removed(self, study, problem, tmp_path):
        """A line that a killed process did not finish does not harm the lines after it."""
        study({"nothing": problem.Nothing}, arms=["each"])
        path = tmp_path / "study" / "results.jsonl"
        complete = path.read_text().splitlines()
        path.write_text("\n".join([*complete[:-1], complete[-1][:20]]))

        study({"nothing": problem.Nothing}, arms=["each"])

        lines = path.read_text().splitlines()
        assert lines[:-1] == complete[:-1]
        assert json.loads(lines[-1])["result"]["arm"] == ["nothing"]

    def test_another_study(self, study, problem):
        """The results of another metric are not mixed with those of this one."""
        study({"nothing": problem.Nothing}, seeds=1)

        with pytest.raises(ValueError, match=r"same study, but metric of .* differ"):
            study({"nothing": problem.Nothing}, metric="loss/train/total")


class TestWrongArguments:
    def test_a_metric_that_is_not_logged(self, study, problem):
        """The error names what is logged."""
        with pytest.raises(ValueError, match=r"\(eval/Accuracy, .*\), got 'eval/Acuracy'"):
            study({"nothing": problem.Nothing}, metric="eval/Acuracy")

    def test_weights_that_are_not_seeded(self, study, problem):
        """The same seed with other initial weights is an error that names the cause, also without other arms."""
        with pytest.raises(ValueError, match="initial weights of baseline with seed 0 differ when it is repeated"):
            study({}, problem.make_unseeded_trainer)

    def test_arms_with_other_weights(self, study, problem):
        """Where only a later seed has other weights, the comparison of its arms shows it."""

        def make_trainer(algorithms, seed):
            make = problem.make_unseeded_trainer if seed == 1 else problem.make_trainer
            return make(algorithms, seed)

        with pytest.raises(ValueError, match="initial weights of baseline with seed 1 differ"):
            study({"nothing": problem.Nothing}, make_trainer)

    def test_a_seed_that_is_not_passed(self, study, problem):
        """A trainer with a seed of its own is an error."""
        with pytest.raises(ValueError, match=r"must pass its seed to Trainer\(seed=seed\)"):
            study({}, lambda algorithms, seed: problem.make_trainer(algorithms, seed=7))

    def test_algorithms_that_are_not_passed(self, study, problem):
        """A trainer without the arm's algorithms is an error."""
        with pytest.raises(ValueError, match="must pass exactly its algorithms"):
            study({"nothing": problem.Nothing}, lambda algorithms, seed: problem.make_trainer([], seed))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": "best"}, "mode must be 'max' or 'min'"),
            ({"seeds": 0}, "seeds must be at least one"),
            ({"seeds": [1, 1]}, "different from each other"),
            ({"processes": 0}, "processes must be a whole number of at least 1"),
            ({"budget": "30 parsecs"}, "budget must be seconds or a text"),
            ({"budget": -1}, "budget must be more than 0"),
        ],
    )
    def test_values_out_of_range(self, options, message):
        """Each raises with its name before anything runs."""
        with pytest.raises(ValueError, match=message):
            ablate(print, {}, metric="eval/Accuracy", **options)

    def test_an_algorithm_instead_of_a_function(self, problem):
        """An algorithm that all runs would share raises."""
        with pytest.raises(TypeError, match=r"Write lambda: Nothing\(…\)"):
            ablate(print, {"nothing": problem.Nothing()}, metric="eval/Accuracy")
