"""Folders that are there whole or not at all, wherever the writing ends; files and folders in order on the disk."""

import os
import signal

import pytest
from crest_train.whole import damage, made_whole, write_whole

SYSTEM_CALLS = ["mkdir", "open", "write", "close", "fsync", "stat", "scandir", "rename", "replace", "unlink", "rmdir"]


def write(path, text):
    with made_whole(path) as folder:
        (folder / "model").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "state").write_text(text * 100)


def ended_at(call, work):
    """How a child ends that does this work and is killed right after so many calls of the operating system."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = [call]

    def counting(function):
        def called(*arguments, **options):
            found = function(*arguments, **options)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return called

    for name in SYSTEM_CALLS:
        setattr(os, name, counting(getattr(os, name)))
    work()
    os._exit(0)


def test_killed_after_any_call_the_new_folder_is_whole_or_not_there(tmp_path):
    write(tmp_path / "step-1", "old")
    call, there = 0, []
    while True:
        call += 1
        path = tmp_path / "step-2"
        ended = ended_at(call, lambda path=path: write(path, "new"))
        there.append(path.exists())
        assert damage(tmp_path / "step-1") is None
        if path.exists():
            assert damage(path) is None and (path / "sub" / "state").read_text() == "new" * 100
            path.rename(tmp_path / f"step-{call + 2}")
        if not ended:
            break
        assert ended == signal.SIGKILL
    assert len(there) > 15 and there == sorted(there) and there[0] is False
    write(tmp_path / "step-2", "again")  # over what the last killed one left


def test_killed_after_any_call_a_file_is_the_old_or_the_new_one(tmp_path):
    path, call, texts = tmp_path / "config.toml", 0, set()
    while True:
        call += 1
        path.write_text("old")
        ended = ended_at(call, lambda: write_whole(path, "new"))
        texts.add(path.read_text())
        if not ended:
            break
    assert texts == {"old", "new"} and call > 5


def test_all_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda place: done.append(os.readlink(f"/proc/self/fd/{place}")) or fsync(place))
    monkeypatch.setattr(os, "rename", lambda one, other: done.append("rename") or rename(one, other))
    write(tmp_path / "step-1", "new")
    new = tmp_path / "step-1.tmp"
    named = done.index("rename")
    wanted = {new / "model", new / "sub" / "state", new / "manifest.json", new / "sub", new}
    assert set(done[:named]) == {str(path) for path in wanted}
    assert done[named + 1 :] == [str(tmp_path)]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), made_whole(tmp_path / "step-1") as folder:
        (folder / "model").write_text("half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "5", "[1]", '{"model": 5}', '{"model": {"bytes": 3}}', "\x00"])
def test_a_manifest_that_is_none_is_damage(tmp_path, text):
    write(tmp_path / "step-1", "new")
    (tmp_path / "step-1" / "manifest.json").write_text(text)
    assert damage(tmp_path / "step-1") == "manifest.json is not what was written"
