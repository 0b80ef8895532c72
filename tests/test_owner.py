"""One run at a time in a run directory: the second is refused, a dead one's place is taken."""

import json
import pathlib
import threading

import pytest
from commands import Command
from runs_of_text import FULL_LM, flags, losses

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.observe.owner import OWNER
from t5x_lab.runs.train import ownership as owner
from t5x_lab.runs.train.ownership import owned


def elsewhere(beat: int, process: int = 7) -> str:
    """Returns the owner file of a process on another machine."""
    return json.dumps({"id": "x", "host": "far", "process": process, "place": "moon", "started": "1", "beat": beat})


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)


def test_a_directory_is_owned_while_the_block_runs(tmp_path, impatient):
    with owned(str(tmp_path)):
        first = json.loads((tmp_path / OWNER).read_text())
        with pytest.MonkeyPatch.context() as other:
            other.setattr(owner.Owner, "is_this_process", lambda self: False)  # seen from a process beside it
            with pytest.raises(
                UserError, match=rf"Process {first['process']} on .* is training in MODEL_DIR .*Choose another MODEL_DIR"
            ):
                owned(str(tmp_path)).__enter__()
        while json.loads((tmp_path / OWNER).read_text())["beat"] < 2:
            pass
    assert not list(tmp_path.iterdir())


def test_a_storage_that_fails_once_does_not_end_the_signs_of_life(tmp_path, impatient, monkeypatch):
    """A remote file system's errors are no OSErrors."""
    with owned(str(tmp_path)):
        write, failed = owner._Ownership._write, []

        def fails_once(self, beat):
            if not failed:
                failed.append(beat)
                raise RuntimeError("503")
            write(self, beat)

        monkeypatch.setattr(owner._Ownership, "_write", fails_once)
        while not failed or json.loads((tmp_path / OWNER).read_text())["beat"] <= failed[0]:
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [elsewhere(3), "", "{"], ids=["dead", "empty", "cut off"])
def test_the_place_of_an_owner_without_a_sign_of_life_is_taken(text, tmp_path, impatient, capfd):
    (tmp_path / OWNER).write_text(text)
    with owned(str(tmp_path)):
        assert json.loads((tmp_path / OWNER).read_text())["host"] != "far"
    assert "s for its heartbeat" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_owner_elsewhere_that_lives_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 5.0)
    (tmp_path / OWNER).write_text(elsewhere(3))
    threading.Timer(0.3, lambda: (tmp_path / OWNER).write_text(elsewhere(4))).start()
    with pytest.raises(UserError, match="Process 7 on far is training"):
        owned(str(tmp_path)).__enter__()
    assert (tmp_path / OWNER).read_text() == elsewhere(4)


def test_of_many_who_take_a_dead_ones_place_one_does(tmp_path, monkeypatch):
    """Threads stand in for processes: none of them takes another for itself, and none is dead."""
    dead = json.loads(elsewhere(1)) | {"place": owner.place(), "process": 2**30}
    monkeypatch.setattr(owner.Owner, "is_this_process", lambda self: False)
    for _ in range(20):
        (tmp_path / OWNER).write_text(json.dumps(dead))
        ownerships = [owner._Ownership(owner.epath.Path(tmp_path) / OWNER) for _ in range(8)]
        owners, barrier = [], threading.Barrier(8)

        def take(ownership, owners=owners, barrier=barrier):
            barrier.wait()
            try:
                ownership.take()
                owners.append(ownership)
            except UserError:
                pass

        threads = [threading.Thread(target=take, args=(ownership,)) for ownership in ownerships]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(owners) == 1
        owners[0].release()
        assert not list(tmp_path.iterdir())


def test_of_two_who_write_at_once_into_an_object_store_the_later_one_stays(tmp_path, monkeypatch):
    """It locks nothing, so that a run looks again a little later."""

    def remote():
        ownership = owner._Ownership(owner.epath.Path(tmp_path) / OWNER)
        ownership._is_remote = True
        return ownership

    first = remote()
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: (tmp_path / OWNER).write_text(elsewhere(0)))
    with pytest.raises(UserError, match="Process 7 on far is training"):
        first.take()
    (tmp_path / OWNER).unlink()
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: None)
    assert first._heartbeat is None
    second = remote()
    second.take()
    assert json.loads((tmp_path / OWNER).read_text())["process"] == second._owner.process
    second.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_second_training_is_refused_and_a_killed_ones_place_is_taken_at_once():
    argv = flags("causal_decoder", FULL_LM, "run", 100_000, "--gin.CHECKPOINT_PERIOD=5")
    pair = [Command(*argv, log=f"{i}.log") for i in range(2)]
    pair[0].wait_until(lambda: not pair[1].is_running())
    alive, refused = sorted(pair, key=lambda process: not process.is_running())
    alive.wait_until(lambda: finished_steps("run"))
    assert alive.is_running() and refused.wait() == 2, refused.output()
    assert f"Process {alive.pid} on" in refused.output()
    alive.kill()
    alive.wait()
    assert pathlib.Path("run", OWNER).exists()
    steps = max(losses("run")) + 3
    again = Command(*flags("causal_decoder", FULL_LM, "run", steps, "--gin.CHECKPOINT_PERIOD=5"), log="again.log")
    assert again.wait() == 0 and "Continuing after step" in again.output(), again.output()
    assert max(losses("run")) == steps and not pathlib.Path("run", OWNER).exists()
