"""What the operating system refuses is told with the place, and what to do."""

import errno
import os

import pytest
import torch

import milepost


def save(path):
    with pytest.raises(milepost.StorageError) as caught:
        milepost.save({"w": torch.ones(3)}, path)
    return caught.value


def test_a_name_that_is_too_long(tmp_path):
    for path in (tmp_path / ("a" * 300), tmp_path.joinpath(*["a" * 200] * 25)):
        error = save(path)
        assert error.errno == errno.ENAMETOOLONG
        assert str(tmp_path) in str(error)
        assert "Choose a shorter path" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "call", "advice"),
    [
        (errno.EROFS, "open", "mounted read-only"),
        (errno.EACCES, "open", "rights of the folder"),
        (errno.EDQUOT, "pwritev", "raise the quota"),
        (errno.ENOSPC, "fsync", "Free some space"),
    ],
)
def test_what_the_system_refuses_is_told_with_what_to_do(tmp_path, monkeypatch, number, call, advice):
    milepost.save({"w": torch.zeros(3)}, tmp_path / "run")
    real = getattr(os, call)

    def refuse(*arguments, **options):
        writes = call != "open" or (len(arguments) > 1 and arguments[1] & (os.O_WRONLY | os.O_CREAT))
        if writes:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        error = save(tmp_path / "run")
    assert error.errno == number
    assert str(tmp_path / "run") in str(error)
    assert advice in str(error)
    assert milepost.open(tmp_path / "run")["w"].read().tolist() == [0.0] * 3
    assert milepost.save({"w": torch.ones(3)}, tmp_path / "run").generation == 2, "the same call works"
