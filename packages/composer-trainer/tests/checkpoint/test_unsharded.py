"""Two processes save and load a model that is not sharded, in unsharded_program.py."""

import json

import pytest


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_program):
    """What each process has written in each step; the program takes more than 5 seconds."""
    folder = tmp_path_factory.mktemp("unsharded")
    run_program("unsharded_program.py", folder)
    found = {step: [json.loads((folder / f"{step}-2-{rank}.json").read_text()) for rank in (0, 1)] for step in STEPS}
    return found | {"alone": json.loads((folder / "alone-1-0.json").read_text())}


STEPS = ("fail", "own", "choose")


class TestFailures:
    def test_folder_of_one_process(self, results):
        """A folder that only the first process has is an error before the first batch, and not at the first save."""
        first, second = (result["other disk"] for result in results["fail"])
        assert first[1] == second[1] == 0
        assert "failed in process 1: CheckpointSaveError" in first[0]
        assert "save_folder must be one folder for all processes" in second[0]

    def test_failed_write(self, results):
        """A save that fails in the background is raised by all processes at the next save."""
        first, second = (result["writing"] for result in results["fail"])
        assert first == ["OSError: [Errno 28] No space left on device", 6]
        assert second[1] == 6
        assert second[0].startswith("CheckpointSaveError: The checkpoint ")
        assert second[0].endswith("process 0 failed: OSError: [Errno 28] No space left on device.")

    def test_failed_snapshot(self, results):
        """What cannot be saved raises an error in all processes at once."""
        first, second = (result["taking"] for result in results["fail"])
        assert first[0].startswith("NotSerializableError: callbacks.Fails.state.value: ")
        assert "failed in process 0: NotSerializableError: callbacks.Fails.state.value: " in second[0]
        assert first[1] == second[1] == 3


class TestOwn:
    def test_each_process_has_its_own(self, results):
        """The second process writes what belongs to it and resumes from that; nothing is gathered to save it."""
        first, second = results["own"]
        assert first["files"] == second["files"] == ["process-00002-of-00002.safetensors"]
        assert first["resumed"] == first["run"][3:]
        assert second["resumed"] == second["run"][3:]
        assert first["resumed"] != second["resumed"]

    def test_weights_alone(self, results):
        """Both processes save the weights together, of which only the first one has a part; both know their path."""
        files = ["layout.json", "manifest.json", "model.safetensors", "state.json"]
        assert [result["weights"] for result in results["own"]] == [["weights-0", *files]] * 2

    def test_one_process_reads_the_first(self, results):
        """In another number of processes, nothing of the others is read, not even if it is damaged."""
        assert results["alone"] == 3


class TestChoice:
    def test_newest_of_a_folder(self, results):
        """All processes load the newest undamaged checkpoint of the folder, and share the comparison of its tensors."""
        assert [result["batch"] for result in results["choose"]] == [6, 6]
        tensors = [{file for name, *files in one["checked"] for file in files} for one in results["choose"]]
        assert "model.safetensors" in tensors[0] ^ tensors[1]
        assert "state.json" in tensors[0] & tensors[1]

    def test_folder_without_an_undamaged_one(self, results):
        """If all are damaged, all processes raise the same error."""
        first, second = (result["none"] for result in results["choose"])
        assert first == second
        assert first.endswith("/runs contains no complete checkpoint.")
