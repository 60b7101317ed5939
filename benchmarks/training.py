"""A transformer in training, for async_save.py: real steps on a state of a given size, timed one by one.

Parameters are fp32 with fused AdamW, 12 bytes each: 13 GB are 1.08 billion. On a GPU the forward pass is bf16
(autocast). On a CPU a step of a large model would take longer than 200 ms. There, at most 200 MB of the state are in
training, and the rest are embedding tables that are only looked up. The number of tokens is chosen so that a step takes
50 to 200 ms.
"""

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional

BYTES_OF_A_PARAMETER = 12  # the parameter and two moments
TRAINED_BYTES_ON_CPU = 200_000_000
TABLE_BYTES = 64 << 20
HEAD = 64
SEQUENCE = 512
LEAST_STEP_S = 0.06  # a shorter step gets twice the tokens, which keeps it well below 200 ms
MOST_TOKENS = 1 << 17
TRIES = 2
PACE_LEAST_STEPS = 3
LIMIT_BYTES = 1 << 30
COPY_BYTES = 16 << 20
COPY_THREADS = 2
COPY_TRIES = 3
PAGE_BYTES = 4096


def dimensions(size_bytes: int) -> tuple[int, int, int]:
    """Width, layers and vocabulary of a decoder whose parameters and moments have about `size_bytes`."""
    parameters = size_bytes / BYTES_OF_A_PARAMETER
    width = max(HEAD, min(2048, int((parameters / 50) ** 0.5) // HEAD * HEAD))
    layers = max(1, int((parameters - 2 * width * width) // (12 * width * width)))
    vocabulary = max(HEAD, round((parameters - 12 * layers * width * width) / width))  # takes the rest
    return width, layers, vocabulary


class Layer(nn.Module):
    """Causal attention and two linear maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer, with its two residual paths."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD)).movedim(1, -2)
        attended = functional.scaled_dot_product_attention(*heads.unbind(1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """A decoder with tied embedding and output, and additional tables that are not trained."""

    def __init__(self, width: int, layers: int, vocabulary: int, frozen_bytes: int) -> None:
        super().__init__()
        sizes = [min(TABLE_BYTES, frozen_bytes - at) for at in range(0, frozen_bytes, TABLE_BYTES)]
        self.tables = nn.ModuleList(nn.Embedding(size // (4 * width) + 1, width) for size in sizes)
        self.tables.requires_grad_(requires_grad=False)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each next token."""
        x = self.embedding(tokens[:, :-1])
        for table in self.tables:
            x = x + table(tokens[:, :-1] % table.num_embeddings)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """A model, its optimizer, and `state`: what a checkpoint of both holds. Updates change its tensors in place."""

    def __init__(self, size_bytes: int, device: str) -> None:
        self.device = device
        trained_bytes = min(size_bytes, TRAINED_BYTES_ON_CPU) if device == "cpu" else size_bytes
        width, layers, self._vocabulary = dimensions(trained_bytes)
        torch.manual_seed(20)
        with torch.device(device):
            self.model = Decoder(width, layers, self._vocabulary, size_bytes - trained_bytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._tokens = self._random_tokens(8)
        self.step()  # makes the moments
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self.state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        self.tensors = [*model.values(), *(t for moments in optimizer["state"].values() for t in moments.values())]
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def calibrate(self) -> float:
        """Choose the number of tokens, and return the seconds of a step with it."""
        count = 8
        while True:
            self._tokens = self._random_tokens(count)
            step_s = statistics.median([self.step() for _ in range(TRIES + 1)][1:])
            if step_s >= LEAST_STEP_S or count >= MOST_TOKENS:
                return step_s
            count *= 2

    def _random_tokens(self, count: int) -> torch.Tensor:
        shape = (max(1, count // SEQUENCE), min(count, SEQUENCE) + 1)
        return torch.randint(self._vocabulary, shape, device=self.device)

    def step(self, before_update: Callable[[], Any] | None = None) -> float:
        """Forward, backward and update. Returns the seconds until the device is done.

        `before_update` is called just before the state changes. Waits only for the stream of the training: copies on
        other streams are not part of a step.
        """
        start = time.monotonic()
        # Zeroed, not freed: allocating pages for new gradients would make the times of steps on a CPU vary.
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            loss = self.model(self._tokens)
        loss.backward()
        if before_update is not None:
            before_update()
        self.optimizer.step()
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()
        return time.monotonic() - start

    def pace(self, seconds: float) -> list[float]:
        """The times of steps for about `seconds`, after one that does not count."""
        self.step()
        steps: list[float] = []
        while sum(steps) < seconds or len(steps) < PACE_LEAST_STEPS:
            steps.append(self.step())
        return steps


class Limit:
    """Copies of all bytes of the state to warm host memory (pinned, for a device), and nothing else.

    The memory is one buffer of at most 1 GiB, used again from its start. A CPU uses two threads where that is faster.
    Each figure is the fastest of a few tries, since a limit must not include the load of other processes.
    """

    def __init__(self, training: Training) -> None:
        self._on_device = training.device != "cpu"
        self._pieces = [
            piece for t in training.tensors for piece in t.detach().view(-1).view(torch.uint8).split(COPY_BYTES)
        ]
        size = min(LIMIT_BYTES, max(COPY_THREADS * COPY_BYTES, training.size_bytes))
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_device).fill_(1)
        self._device = torch.empty(size, dtype=torch.uint8, device=training.device) if self._on_device else None

    def to_host_s(self) -> float:
        """Seconds for all bytes, with one or two threads, whichever is faster."""
        ways = (1,) if self._on_device else (1, COPY_THREADS)
        return min(self._copies_s(self._host, threads) for threads in ways for _ in range(COPY_TRIES))

    def on_device_s(self) -> float | None:
        """Seconds for all bytes within the device."""
        if self._device is None:
            return None
        return min(self._copies_s(self._device, 1) for _ in range(COPY_TRIES))

    def _copies_s(self, buffer: torch.Tensor, threads: int) -> float:
        """Seconds with `threads` threads, each with a part of the buffer."""
        room = len(buffer) // threads // PAGE_BYTES * PAGE_BYTES
        shares = [(buffer[i * room : (i + 1) * room], self._pieces[i::threads]) for i in range(threads)]
        others = [threading.Thread(target=_copy, args=share) for share in shares[1:]]
        start = time.monotonic()
        for thread in others:
            thread.start()
        _copy(*shares[0])
        for thread in others:
            thread.join()
        if self._on_device:
            torch.cuda.current_stream().synchronize()
        return time.monotonic() - start


def _copy(buffer: torch.Tensor, pieces: list[torch.Tensor]) -> None:
    position = 0
    for piece in pieces:
        if position + len(piece) > len(buffer):
            position = 0
        buffer[position : position + len(piece)].copy_(piece, non_blocking=True)
        position += -(-len(piece) // PAGE_BYTES) * PAGE_BYTES


class Witness:
    """Copies of the last matrix of the model and of its moment, made at one time."""

    def __init__(self, training: Training) -> None:
        self._key = [key for key, weight in training.state["model"].items() if weight.dim() > 1][-1]
        moments = training.state["optimizer"]["state"][self._key]
        self._then = [training.state["model"][self._key].clone(), moments["exp_avg"].clone()]

    def check(self, load: Callable[[dict[str, Any], Path], None], where: Path) -> None:
        """Raise AssertionError unless the checkpoint holds these values."""
        weight, moment = (torch.empty_like(tensor) for tensor in self._then)
        load({"model": {self._key: weight}, "optimizer": {"state": {self._key: {"exp_avg": moment}}}}, where)
        if not all(map(torch.equal, (weight, moment), self._then)):
            raise AssertionError(f"the checkpoint holds another {self._key} than the state had at the call")
