"""Finding the newest complete checkpoint."""

import pytest

from composer.checkpoint import CheckpointError, find_checkpoints, finding, newest_checkpoint, save_checkpoint
from composer.checkpoint.finding import agreed_path, locate


@pytest.fixture
def three_checkpoints(runs, tmp_path):
    """Return a folder with three checkpoints whose names and clocks sort differently."""
    for batch in (100, 20, 3):
        save_checkpoint(runs.make(batch=batch), tmp_path / f"ba{batch}")
    return tmp_path


class TestFindCheckpoints:
    def test_sorted_by_clock(self, three_checkpoints):
        """The oldest is first, by batches and not by name."""
        assert [one.name for one in find_checkpoints(three_checkpoints)] == ["ba3", "ba20", "ba100"]

    def test_reasons(self, three_checkpoints):
        """Incomplete ones are first, with the reason."""
        (three_checkpoints / "ba20" / "manifest.json").unlink()
        (three_checkpoints / "notes").mkdir()
        (three_checkpoints / "file").write_text("")

        result = find_checkpoints(three_checkpoints)

        assert [one.name for one in result] == ["ba20", "notes", "ba3", "ba100"]
        assert "ba20/manifest.json is missing" in result[0].problem

    def test_temporary_folders_are_excluded(self, three_checkpoints):
        """Temporary folders and links are excluded."""
        (three_checkpoints / "ba20").rename(three_checkpoints / ".ba20.17-0a1b2c3d.tmp")
        (three_checkpoints / "latest").symlink_to("ba100")

        assert [one.name for one in find_checkpoints(three_checkpoints)] == ["ba3", "ba100"]


class TestNewestCheckpoint:
    def test_newest(self, three_checkpoints):
        """The one with the most batches is the newest."""
        assert newest_checkpoint(three_checkpoints).path == str(three_checkpoints / "ba100")

    def test_changed_checkpoint_is_skipped(self, three_checkpoints):
        """A changed checkpoint is skipped with a warning that names the file."""
        path = three_checkpoints / "ba100" / "model.safetensors"
        path.write_bytes(bytes(path.stat().st_size))

        with pytest.warns(UserWarning, match=r"Skipped a checkpoint .*ba100/model\.safetensors has been changed"):
            result = newest_checkpoint(three_checkpoints)

        assert result.name == "ba20"

    def test_run_name(self, runs, three_checkpoints):
        """Only checkpoints of the given run are considered."""
        save_checkpoint(runs.make(batch=500, run_name="other"), three_checkpoints / "other")

        assert newest_checkpoint(three_checkpoints, run_name="blur").name == "ba100"
        assert newest_checkpoint(three_checkpoints, run_name="nobody") is None

    def test_weights_only_is_excluded_by_default(self, runs, three_checkpoints):
        """A checkpoint of weights is returned only on request."""
        save_checkpoint(runs.make(batch=500), three_checkpoints / "weights", weights_only=True)

        assert newest_checkpoint(three_checkpoints).name == "ba100"
        assert newest_checkpoint(three_checkpoints, weights_only=None).name == "weights"

    def test_completed_epoch_is_newer(self, runs, tmp_path):
        """Of two with equal batches the one with the completed epoch is newer."""
        state = runs.make(batch=5)
        save_checkpoint(state, tmp_path / "b-before")
        state.timestamp = state.timestamp.to_next_epoch()
        save_checkpoint(state, tmp_path / "a-after")

        assert newest_checkpoint(tmp_path).name == "a-after"


class TestLocate:
    def test_links(self, three_checkpoints):
        """A link is followed before its checkpoint is opened."""
        (three_checkpoints / "best").symlink_to("ba20")

        folder, name = locate(three_checkpoints / "best")

        assert folder.at(name) == str(three_checkpoints / "ba20")

    @pytest.mark.parametrize(
        ("target", "reason"),
        [
            ("link", "cannot be read: Too many levels of symbolic links"),
            ("nothing", "does not exist"),
            ("file/ep1", "does not exist"),  # its parent is no folder
        ],
    )
    def test_links_without_a_checkpoint(self, tmp_path, target, reason):
        """A link to itself, to nothing or below a file raises with that reason."""
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(target)

        with pytest.raises(CheckpointError, match=rf"link {reason}"):
            locate(tmp_path / "link")


def test_link_is_resolved_by_rank_zero(runs, tmp_path, monkeypatch):
    """All processes load what the link of rank 0 leads to, as the link may change before the others follow it."""
    save_checkpoint(runs.make(), tmp_path / "ba20")
    (tmp_path / "best").symlink_to("ba20")
    monkeypatch.setattr(finding, "get_world_size", lambda: 2)

    path = agreed_path(str(tmp_path / "best"))

    assert path == str(tmp_path / "ba20")
