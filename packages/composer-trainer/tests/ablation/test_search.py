"""The greedy search: its proposal is the known best set, also after interruptions, and is judged with other seeds."""

import itertools
import json
import random
from concurrent.futures import Future

import pytest

from composer.ablation import Study
from composer.ablation.__main__ import main
from composer.ablation.results import Result

GAINS = {"a": 0.10, "b": 0.08, "c": 0.03, "d": -0.02}


def quality(arm, seed):
    """Return a quality: the gains add up, but ``a`` and ``b`` together are worse than each of them alone."""
    return 0.5 + seed / 1000 + sum(GAINS[name] for name in arm) - (0.15 if {"a", "b"} <= {*arm} else 0.0)


class Calculated:
    """An executor that calculates the results of runs, and may be interrupted after a number of them."""

    def __init__(self, quality=quality, runs=None):
        self.quality, self.runs, self.done = quality, runs, []

    def submit(self, run, job):
        future = Future()
        if job.only_start:
            future.set_result(Result(job.arm, job.seed, batches=str(job.seed), mode=job.mode or "max"))
        else:
            if self.runs == len(self.done):
                raise KeyboardInterrupt
            self.done.append((job.arm, job.seed))
            value = self.quality(job.arm, job.seed)
            run = {"failure": "NaN"} if value is None else {"curve": ((1.0, value),), "seconds": 1.0}
            future.set_result(Result(job.arm, job.seed, **run, batches=str(job.seed)))
        return future


@pytest.fixture
def search(study, problem):
    """Return a function that searches with calculated results, of which each does not train."""

    def run(executor, names="abcd", **options):
        algorithms = dict.fromkeys(names, problem.Nothing)
        return study(algorithms, executor=executor, **{"arms": "greedy", "processes": 1, "seeds": 3} | options)

    return run


def final(study):
    """Return the final values by arm and seed."""
    return {(one.arm, one.seed): one.curve[-1][1] for one in study.results}


class TestProposal:
    @pytest.mark.parametrize("mode", ["max", "min"])
    def test_is_the_best_of_all_sets(self, search, mode):
        """The set without the method that is worse beside another one, which has the best mean of all 16 sets."""
        sign = 1 if mode == "max" else -1
        executor = Calculated(lambda arm, seed: sign * quality(arm, seed))
        sets = [arm for size in range(5) for arm in itertools.combinations("abcd", size)]

        found = search(executor, mode=mode)

        assert found.proposal == max(sets, key=lambda arm: quality(arm, 0)) == ("a", "c")
        assert quality(("a", "b"), 0) < min(quality(("a",), 0), quality(("b",), 0))
        assert [row.arm for row in found.rows][1:] == [
            *itertools.product("abcd"),
            *(("a", "b"), ("a", "c"), ("a", "d"), ("a", "b", "c"), ("a", "c", "d")),
        ]

    def test_of_trainings(self, study, problem):
        """Trained models: the bonus of 0.25 is proposed, what changes nothing is not, and other seeds confirm it."""
        found = study({"nothing": problem.Nothing, "bonus": problem.Bonus}, arms=["greedy"])

        assert found.proposal == ("bonus",)
        assert found.held_out.settings.seeds == (2, 3)
        assert [(row.label, row.runs) for row in found.held_out.rows] == [("baseline", 2), ("bonus", 2)]
        assert found.held_out.improvement(("bonus",)).mean == pytest.approx(0.25)

    def test_nothing_improves(self, search):
        """Nothing is proposed and no other seed is trained, also if two methods would be better together."""
        executor = Calculated(lambda arm, seed: seed / 1000 + (0.2 if len(arm) == 2 else -0.1 * len(arm)))

        found = search(executor, names="ab")

        assert (found.proposal, found.held_out) == ((), None)
        assert {seed for _, seed in executor.done} == {0, 1, 2}
        assert found.sentences()[0].startswith("The greedy search proposes no algorithm: none improves the mean")

    @pytest.mark.parametrize(("names", "proposal"), [("abcd", ("a", "c")), ("d", ())])
    def test_the_baseline_failed_with_one_seed(self, search, names, proposal):
        """Arms are compared with the baseline on the other seeds; one that is worse is not proposed."""

        def of_runs(arm, seed):
            return quality(arm, seed) + seed if arm or seed not in {0, 3} else None

        found = search(Calculated(of_runs), names=names)

        assert found.proposal == proposal
        assert "baseline failed with seed 0: NaN" in str(found)
        assert not proposal or "(4, 5): 5.135 with a + c, 5.005 with the baseline, a difference of +0.13" in str(found)

    def test_the_baseline_failed_with_each_seed(self, search):
        """Nothing can be compared, which the study states."""
        found = search(Calculated(lambda arm, seed: quality(arm, seed) if arm else None))

        assert (found.proposal, found.held_out) == ((), None)
        assert found.sentences()[0] == "The greedy search proposes no algorithm: the baseline failed with each seed."

    def test_a_set_that_fails_is_not_proposed(self, study, problem):
        """Methods that set one argument of make_trainer twice fail together, and the better one is proposed."""
        methods = {"short": {"max_duration": "1ep"}, "long": {"max_duration": "9ep"}}

        found = study(methods, arms="greedy", metric="loss/train/total", seeds=1)

        assert found.proposal == ("long",)
        (failure,) = {row.arm: row for row in found.rows}["short", "long"].failures
        assert failure == (0, "ValueError: short + long has several values of one argument of make_trainer.")


class TestEstimate:
    def test_luck_is_not_reported_as_a_gain(self, search):
        """Methods without effect: the search finds a gain of a deviation or more, and other seeds find half at most."""
        names = [f"m{number}" for number in range(20)]

        def noise(arm, seed):
            return random.Random(f"{arm} {seed}").gauss(0.5, 0.1)

        found = search(Calculated(noise), names, seeds=3)

        gains = [one.improvement(found.proposal).mean for one in (found, found.held_out)]
        assert gains[0] > 0.1
        assert gains[1] < gains[0] / 2

    def test_sentences(self, search):
        """Both numbers are below the table, and that of the search is stated to be no estimate."""
        text = str(search(Calculated(lambda arm, seed: quality(arm, seed) - (0.05 if arm and seed > 2 else 0))))

        assert "proposes a + c. Its difference in the table is the best one of 9 arms" in text
        assert "neither it nor its p-value is an estimate" in text
        assert "(3, 4, 5): 0.584 with a + c, 0.504 with the baseline, a difference of +0.08 [+0.08, +0.08]." in text

    def test_stored_and_written(self, search, tmp_path):
        """A loaded study, its JSON and the answer of its page have the estimate."""
        found = search(Calculated(lambda arm, seed: quality(arm, seed) + random.Random(str(arm)).random() / 1e4))

        loaded = Study.load(tmp_path / "study")
        loaded.report(tmp_path / "page.md")
        written = json.loads(loaded.to_json())

        assert str(loaded) == str(found)
        assert (written["proposal"], len(written["results"])) == (["a", "c"], 30)
        assert [len(row["arm"]) for row in written["held_out"]["rows"]] == [0, 2]
        assert f"a + c is better than the baseline: eval/Accuracy is {0.634:.3f}" in (tmp_path / "page.md").read_text()

    def test_other_studies_have_none(self, search):
        """Without a search nothing is proposed, and no seed is held out."""
        found = search(Calculated(), arms=["each"])

        assert (found.proposal, found.held_out, found.settings.held_out) == ((), None, ())


class TestContinuing:
    def test_interrupted_anywhere(self, search, tmp_path):
        """Wherever it was interrupted, a continued search repeats no run and has the same results."""
        complete = Calculated()
        expected = search(complete, folder=tmp_path / "complete")

        for runs in range(0, len(complete.done), 4):
            first, second = Calculated(runs=runs), Calculated()
            with pytest.raises(KeyboardInterrupt):
                search(first, folder=tmp_path / str(runs))
            continued = search(second, folder=tmp_path / str(runs))

            assert first.done + second.done == complete.done
            assert (continued.proposal, final(continued)) == (expected.proposal, final(expected))
            assert final(continued.held_out) == final(expected.held_out)

    def test_incomplete(self, search, tmp_path):
        """A study that is running states that its proposal is that until now, and has no estimate."""
        with pytest.raises(KeyboardInterrupt):
            search(Calculated(runs=20))

        loaded = Study.load(tmp_path / "study")

        assert loaded.proposal == ("a",)
        assert loaded.sentences()[0].startswith("The greedy search proposes a until now.")
        assert not any("estimate is" in one for one in loaded.sentences())

    def test_more_seeds(self, search):
        """With the former held-out seeds in the search, others are held out; a study keeps those that are unused."""
        held_out = [
            search(Calculated(), **options).settings.held_out
            for options in ({"seeds": 2}, {"seeds": 4}, {"seeds": 2}, {"seeds": 2}, {"seeds": 2, "held_out": [50]})
        ]

        assert held_out == [(2, 3), (4, 5, 6, 7), (4, 5, 6, 7), (4, 5, 6, 7), (50,)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"held_out": [7, 1]}, r"held_out must be seeds that the search does not use, but it has \[1\]"),
            ({"held_out": [7], "arms": ["each"]}, r"held_out is for arms='greedy'.* got arms=\['each'\]"),
            ({"held_out": [7, 7]}, "held_out must be at least one, and different from each other"),
        ],
    )
    def test_wrong_seeds(self, search, options, message):
        """Seeds of the search, seeds without a search and repeated ones raise an error before anything runs."""
        executor = Calculated()

        with pytest.raises(ValueError, match=message):
            search(executor, **options)
        assert executor.done == []


def test_command_line(tmp_path, capsys, monkeypatch):
    """The options of the command are those of the function."""
    seen = {}
    monkeypatch.setattr("composer.ablation.__main__.ablate", lambda *_, **options: seen.update(options))
    (tmp_path / "study.py").write_text("make_trainer, algorithms, metric = print, {}, 'eval/Accuracy'\n")

    with pytest.raises(AttributeError):  # there is no study to print
        main(["run", str(tmp_path / "study.py"), "--arms", "greedy", "--held-out", "8", "9"])

    assert seen == {"metric": "eval/Accuracy", "arms": ["greedy"], "held_out": [8, 9]}
