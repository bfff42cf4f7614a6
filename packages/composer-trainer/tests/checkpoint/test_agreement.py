"""All processes load the same checkpoint; several processes are in ``test_sharded.py``."""

from composer.checkpoint import agreement, save_checkpoint
from composer.checkpoint.agreement import agreed_path


def test_link_is_resolved_by_rank_zero(runs, tmp_path, monkeypatch):
    """All processes load what the link of rank 0 leads to, as the link may change before the others follow it."""
    save_checkpoint(runs.make(), tmp_path / "ba20")
    (tmp_path / "best").symlink_to("ba20")
    monkeypatch.setattr(agreement, "get_world_size", lambda: 2)

    path = agreed_path(str(tmp_path / "best"), "load_path")

    assert path == str(tmp_path / "ba20")
