"""Data that several steps share in an object store: a small model of the protocol, and all orders of its requests.

The model is `milepost.commit.signs` in a few lines: a set of names, and actors that send one request after the other.
Every state that any order of the requests can lead to is looked at. An actor that dies is one that is not heard of
again, so each state is also one after a crash. Some requests get no reply and take effect later, or take effect twice.
"""

from collections import deque
from functools import partial

import pytest

NO_REPLY = "no reply"


def saver(step, bases, *, looks=True, ranks=1):
    """Save a step on the newest of these. Each rank that finds its base alive goes on using its file."""
    held = None
    for base in bases:
        manifests = yield "list", (base, "manifest")
        if manifests and not (yield "list", (base, "marker")):
            held = base, manifests[0][2]
            break
    uses = ()
    if held is not None:
        base, (folder, *_) = held[0], [*held[1], None] if held[1] else (held[0], None)
        kept = []
        for rank in range(ranks):
            if (yield "create", (step, "note", rank)) == NO_REPLY:
                continue
            if (yield "create", (folder, "sign", step, rank)) == NO_REPLY:
                continue
            if looks:
                marked = yield "list", (base, "marker")
                if marked or not (yield "list", (base, "manifest")):
                    continue
            kept.append(rank)
        uses = (folder,) if len(kept) == ranks else ()
    if not uses and (yield "create", (step, "data")) == NO_REPLY:
        return
    if (yield "create", (step, "manifest", uses)) == NO_REPLY:
        return
    if (yield "list", (step, "marker")):
        yield "delete", ((step, "manifest", uses),)


def clear(step, *, lists_twice=True):
    """Delete the data of a removed step, unless another uses it."""
    notes = yield "list", (step, "note")
    if notes and (yield "delete", tuple(notes)) == NO_REPLY:
        return
    signs, dead = (yield "list", (step, "sign")), set()
    while set(signs) - dead:
        for sign in sorted(set(signs) - dead):
            if (yield "list", (sign[2], "note", sign[3])):
                return
            dead.add(sign)
        if lists_twice:
            signs = yield "list", (step, "sign")
    if dead or (yield "list", (step, "data")):
        yield "delete", ((step, "data"), *sorted(dead))


def remover(steps, *, notes_first=False, data_first=False, **how):
    """Remove these steps, and then look again at what was left."""
    for step in steps:
        manifests = yield "list", (step, "manifest")
        if not manifests:
            continue
        if notes_first:
            yield "delete", tuple((yield "list", (step, "note")))
        if data_first:
            yield from clear(step, **how)
        if (yield "create", (step, "marker")) == NO_REPLY or (yield "delete", tuple(manifests)) == NO_REPLY:
            return
        yield from clear(step, **how)
    for step in steps:
        if (yield "list", (step, "marker")):
            yield from clear(step, **how)


def answer(objects, request):
    """What a request does to the set of names, and its reply."""
    kind, what = request
    if kind == "list":
        return objects, tuple(sorted(name for name in objects if name[: len(what)] == what))
    return (objects | {what} if kind == "create" else objects - set(what)), None


def next_request(actor, replies):
    """What an actor asks next, after these replies; None if it has ended."""
    running = actor()
    try:
        request = next(running)
        for reply in replies:
            request = running.send(reply)
    except StopIteration:
        return None
    return request


def heard(replies, at, reply):
    """The replies that the actors have got, with one more for this one."""
    return (*replies[:at], (*replies[at], reply), *replies[at + 1 :])


def broken(objects):
    """A step that is committed, and whose data is not there; None if there is none."""
    for name in objects:
        if name[1] == "manifest" and (name[0], "marker") not in objects:
            step, _, uses = name
            if any((folder, "data") not in objects for folder in uses or (step,)):
                return step
    return None


def explore(start, actors, late_requests=0):
    """All states that the actors can reach: (how many, the first that is broken, those in which all have ended)."""
    first = (frozenset(start), frozenset(), late_requests, ((),) * len(actors))
    seen, ends, pending, asked = {first}, [], deque([first]), {}
    while pending:
        objects, waiting, budget, replies = state = pending.popleft()
        if broken(objects) is not None:
            return len(seen), state, ends
        found = [(answer(objects, late)[0], waiting - {late}, budget, replies) for late in waiting]
        for at, actor in enumerate(actors):
            key = at, replies[at]
            if key not in asked:
                asked[key] = next_request(actor, replies[at])
            request = asked[key]
            if request is None:
                continue
            changed, reply = answer(objects, request)
            found.append((changed, waiting, budget, heard(replies, at, reply)))
            if budget and request[0] != "list":
                found.append((objects, waiting | {request}, budget - 1, heard(replies, at, NO_REPLY)))
                found.append((changed, waiting | {request}, budget - 1, heard(replies, at, reply)))
        if not found:
            ends.append(objects)
        for one in found:
            if one not in seen:
                seen.add(one)
                pending.append(one)
    return len(seen), None, ends


START = {(1, "data"), (1, "manifest", ())}
SECOND = {(2, "manifest", (1,)), (2, "note", 0), (1, "sign", 2, 0)}
SCENES = {
    "a saver and two removers": (START, [partial(saver, 2, [1]), partial(remover, [1]), partial(remover, [1])]),
    "two savers and a remover of both bases": (
        START,
        [partial(saver, 2, [1]), partial(saver, 3, [2, 1]), partial(remover, [1, 2])],
    ),
    "a base that uses another's data, and two removers": (
        START | SECOND,
        [partial(saver, 3, [2]), partial(remover, [1]), partial(remover, [2, 1])],
    ),
    "data of a removed step, and two removers": (
        START - {(1, "manifest", ())} | SECOND | {(1, "marker")},
        [partial(saver, 3, [2]), partial(remover, [1]), partial(remover, [2, 1])],
    ),
    "two savers of one step's data": (
        START,
        [partial(saver, 2, [1]), partial(saver, 3, [1]), partial(remover, [1]), partial(remover, [2])],
    ),
    "two ranks": (START, [partial(saver, 2, [1], ranks=2), partial(remover, [1]), partial(remover, [2, 1])]),
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_order_leaves_committed_steps_whole(scene):
    count, found, ends = explore(*SCENES[scene])
    assert found is None
    assert count > 5000
    assert ends


MANY = ("two savers of one step's data", "two ranks")
"""Scenes with millions of states, where requests can be late."""
RARE = [pytest.param(scene, marks=pytest.mark.slow) for scene in SCENES if scene not in MANY]


@pytest.mark.parametrize("scene", RARE)
def test_late_request_leaves_committed_steps_whole(scene):
    """Any one request gets no reply and takes effect at any time, or is sent again and takes effect twice."""
    count, found, _ = explore(*SCENES[scene], late_requests=1)
    assert found is None
    assert count > 50_000


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_stays_when_all_steps_are_removed(scene):
    start, actors = SCENES[scene]
    _, _, ends = explore(start, actors)
    for objects in set(ends):
        _, _, [left] = explore(objects, [partial(remover, [3, 2, 1])])
        assert {name[1] for name in left} <= {"marker"}


WRONG = {
    "no look": (START, [partial(saver, 2, [1], looks=False), partial(remover, [1])]),
    "no second listing": (
        START - {(1, "manifest", ())} | SECOND | {(1, "marker")},
        [partial(saver, 3, [2]), partial(remover, [1], lists_twice=False), partial(remover, [2])],
    ),
    "notes that go before the manifest": (
        START | SECOND,
        [partial(remover, [1]), partial(remover, [2], notes_first=True)],
    ),
    "data that goes before the manifest": (START, [partial(saver, 2, [1]), partial(remover, [1], data_first=True)]),
}


@pytest.mark.parametrize("what", WRONG)
def test_protocol_without_one_of_its_steps_loses_data(what):
    assert explore(*WRONG[what])[1] is not None
