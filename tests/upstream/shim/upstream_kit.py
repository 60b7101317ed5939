"""Torch's kit for tests, on a machine without accelerators: ranks are processes on the CPU, with gloo.

Each patch runs right after its module of torch was loaded. A test that starts no rank at all counts as skipped, where
torch's kit lets it pass.
"""

import importlib.abc
import importlib.machinery
import sys

PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.optim",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
]
FACTORIES = ("rand", "randn", "zeros", "ones", "empty", "full", "arange", "tensor", "randint")
DEVICES = 8


def install():
    sys.meta_path.insert(0, PatchFinder())


class PatchFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        patch = PATCHES.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if patch else None
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def patch_kit(kit):
    count_as_skipped(kit)
    fork_ranks(kit)
    for name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend", "requires_nccl"):
        setattr(kit, name, lambda *_, **__: lambda test: test)
    if not kit.torch.accelerator.is_available():
        kit.torch.accelerator.device_count = lambda: DEVICES  # some tests have as many ranks
        numbers_are_the_cpu(kit.torch)


def count_as_skipped(kit):
    check = kit.MultiProcessTestCase._check_return_codes

    def checked(self, fn, elapsed_time):
        if not self.processes:
            raise kit.unittest.SkipTest("no ranks were started")
        return check(self, fn, elapsed_time)

    kit.MultiProcessTestCase._check_return_codes = checked


def fork_ranks(kit):
    """Fork ranks from a server that has torch and its kit loaded: else each rank imports torch again."""
    context = kit.torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    kit.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(context.Process)


def numbers_are_the_cpu(torch):
    """Tests write `.to(self.rank)` and `torch.rand(8, device=rank)`."""
    import torch.distributed.optim  # compiles torch.zeros and others when it is imported, before they are wrapped

    def moving(to):
        return lambda self, *args, **options: self if args and type(args[0]) is int else to(self, *args, **options)

    def making(make):
        def made(*args, **options):
            if type(options.get("device")) is int:
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    torch.nn.Module.to, torch.Tensor.to = moving(torch.nn.Module.to), moving(torch.Tensor.to)
    for name in FACTORIES:
        setattr(torch, name, making(getattr(torch, name)))


def patch_sharded_tensors(kit):
    with_comms = kit.with_comms
    kit.with_comms = lambda func=None, init_rpc=True, backend="nccl": with_comms(func, init_rpc, "gloo")


def patch_dtensors(kit):
    init = kit.DTensorTestBase.init_pg

    def init_pg(self, eager_init, backend=None):
        backend = backend or self.backend
        return init(self, eager_init, "gloo" if "gloo" in backend or "nccl" in backend else backend)

    kit.DTensorTestBase.init_pg = init_pg


def patch_fsdp(module):
    """FSDP1 refuses a machine without accelerators, unless it is told to use the CPU."""
    import torch

    init = module._init_device_handle

    def with_device(state, inner, ignored_params, device_id):
        if device_id is None and not torch.accelerator.is_available():
            device_id = torch.device("cpu")
        return init(state, inner, ignored_params, device_id)

    module._init_device_handle = with_device


def patch_remote_devices(module):
    """ "rank:1/cpu:1" is the CPU."""
    import torch

    init = module._remote_device.__init__

    def without_number(self, remote_device):
        init(self, remote_device)
        if self._device.type == "cpu":
            self._device = torch.device("cpu")

    module._remote_device.__init__ = without_number


def patch_comparison(module):
    """Two ShardedTensors are compared through the current accelerator."""

    def communicate(result, pg):
        import torch
        import torch.distributed as dist

        votes = torch.tensor([1.0 if result else 0.0])
        dist.all_reduce(votes, group=pg)
        return bool(votes.item() == dist.get_world_size(pg))

    module._communicate_result = communicate


PATCHES = {
    "torch.testing._internal.common_distributed": patch_kit,
    "torch.testing._internal.distributed._shard.sharded_tensor": patch_sharded_tensors,
    "torch.testing._internal.distributed._tensor.common_dtensor": patch_dtensors,
    "torch.distributed.fsdp._init_utils": patch_fsdp,
    "torch.distributed.remote_device": patch_remote_devices,
    "torch.distributed._shard.sharded_tensor._ops.binary_cmp": patch_comparison,
}
