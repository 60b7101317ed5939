"""A store that tells how much was read from it."""

from milepost.store import LocalStore


class Reading(LocalStore):
    """A store that counts the bytes of shard files that are read from it."""

    bytes_read = 0

    def reader(self, name, **expected):
        reader = super().reader(name, **expected)
        if name.startswith("data/"):
            reader.read = self._counted(reader.read)
            reader.read_cold = self._counted(reader.read_cold)
        return reader

    def _counted(self, read):
        def counted(offset, views):
            self.bytes_read += sum(map(len, views)) if isinstance(views, list) else len(views)
            read(offset, views)

        return counted
