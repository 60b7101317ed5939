"""File systems of fsspec for tests."""

import itertools
from typing import ClassVar

from fsspec.implementations.memory import MemoryFileSystem


class Moving(MemoryFileSystem):
    """One that cannot put an object only if its name is free, as an SFTP server."""

    protocol = "moving"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    def pipe_file(self, path, value, **options):
        assert "mode" not in options
        return super().pipe_file(path, value)


class Failing(MemoryFileSystem):
    """One whose connection breaks at write number `at`, after half of the bytes arrived; `broken` tells that it did."""

    protocol = "failing"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    at = None
    count = itertools.count()
    broken = False

    @classmethod
    def break_at(cls, number):
        cls.at, cls.count, cls.broken = number, itertools.count(), False

    def _arrives(self, path, data):
        if next(self.count) == self.at:
            type(self).broken = True
            with super().open(path, "wb") as file:
                file.write(data[: len(data) // 2])
            raise ConnectionResetError(f"the connection broke while {path} was written")

    def put_file(self, lpath, rpath, *args, **options):
        with open(lpath, "rb") as file:
            self._arrives(rpath, file.read())
        return super().put_file(lpath, rpath, *args, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        if next(self.count) == self.at:  # an object store shows no half of an object
            type(self).broken = True
            raise ConnectionResetError(f"the connection broke while {path} was put")
        return super().pipe_file(path, value, mode=mode, **options)


class Short(MemoryFileSystem):
    """One that loses the last byte of a file, and does not say so."""

    protocol = "short"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    def put_file(self, lpath, rpath, *args, **options):
        with open(lpath, "rb") as file:
            super().pipe_file(rpath, file.read()[:-1])
