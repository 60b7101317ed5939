"""What a disk may hold after a power cut."""

import random


def states_of(store, first, draws):
    """What each moment may leave of the unsynced calls: none, all, all but one, just one, and random ones.

    The same state at a later moment is not yielded again.
    """
    dice, seen = random.Random(draws), set()
    for at in range(first, len(store.journal) + 1):
        unsynced = {}
        store.after_power_cut(unsynced.setdefault, at)  # asks for each of them, and gets None
        choices = [lambda _: False, lambda _: True]
        for one in unsynced:
            choices += [lambda call, one=one: call != one, lambda call, one=one: call == one]
        choices += [lambda _, likely=likely: dice.random() < likely for likely in (0.1, 0.5, 0.9) for _ in range(draws)]
        for choose in choices:
            found = store.after_power_cut(choose, at)
            key = frozenset(found.objects.items())
            if key not in seen:
                seen.add(key)
                yield at, found
