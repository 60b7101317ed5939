"""Every public name of torch.distributed.checkpoint is here, in the same module, with the same parameters."""

import importlib
import inspect
import pkgutil

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import milepost.dcp

LEFT_OUT = {"_experimental": "torch's next design, which changes from release to release"}
TORCHS_OWN = {
    "_consolidate_hf_safetensors": "_FqnData _InputFileData _OutputFileData _consolidate_safetensors_files "
    "_parse_input_metadata _process_output_file _read_tensor_data _write_data _write_metadata "
    "_write_overall_metadata_file",
    "_dedup_tensors": "init_logger",
    "_pg_transport": "PGTransport _DTensorMeta _ShardedTensorMeta _StateDictMeta _TensorMeta _cast_tensor "
    "_prepare_state_dict _prepare_tensor _timeit",
    "_state_dict_stager": "StateDictStager",
    "_traverse": "_print_nested print_tensor",
    "filesystem": "FileSystem FileSystemBase SerializationFormat _FileSystemWriter _OverlappingCpuLoader "
    "_SerialCpuLoader _StorageInfo _StoragePrefix _StorageReaderTransforms _StorageWriterTransforms _TensorLoader "
    "_generate_uuid _item_size _write_files_from_queue",
    "format_utils": "BroadcastingTorchSaveReader",
    "logger": "_dcp_method_logger _get_msg_dict _init_logger _msg_dict_from_dcp_method_args",
    "metadata": "_MEM_FORMAT_ENCODING",
    "optimizer": "_ReaderWithOffset _alloc_tensor _create_colwise_spec _gen_rank_device _get_state_dict_2d_layout "
    "_is_nested_tensor",
    "state_dict": "StateDictOptions _EXTRA_STATE _StateDictInfo _flatten_optim_state_dict _gc_context _get_fqns "
    "_get_fsdp_process_group _get_model_state_dict _get_optim_state_dict _init_optim_state "
    "_iterate_valid_model_state _load_model_state_dict _load_optim_state_dict _maybe_full_or_cpu_state_dict "
    "_patch_model_state_dict _patch_optimizer_state_dict _split_optim_state_dict _state_dict_fn "
    "_unflatten_model_state_dict _unflatten_optim_state_dict _verify_options _verify_state_dict "
    "get_model_state_dict get_optimizer_state_dict get_state_dict set_model_state_dict set_optimizer_state_dict "
    "set_state_dict",
    "state_dict_saver": "AsyncCheckpointerType AsyncSaveResponse",
    "utils": "_ReaderView _all_gather_keys _api_bc_check _assert_same_keys _create_file_view _get_failure_dict "
    "_normalize_device_info _profile",
}
"""Classes and functions that are torch's own. docs/reference/dcp.md says why."""
OTHER_PARAMETERS = {}
NAMES = [m.name for m in pkgutil.iter_modules(torch_dcp.__path__) if m.name not in LEFT_OUT]


def pair(name):
    try:
        theirs = importlib.import_module(f"torch.distributed.checkpoint.{name}")
    except ImportError as error:
        pytest.skip(f"torch's needs {error.name}")
    return theirs, importlib.import_module(f"milepost.dcp.{name}")


def names_of(module):
    """All names that a program can import from a module of torch's, but those of other packages."""
    for name, value in vars(module).items():
        home = getattr(value, "__module__", "") or ""
        foreign = callable(value) and not home.startswith(torch_dcp.__name__)
        if not name.startswith("__") and not inspect.ismodule(value) and not foreign and name != "TYPE_CHECKING":
            yield name


MIRRORED = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="private names are those of torch 2.13, which is mirrored"
)


@MIRRORED
@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_all_names_of_torchs(name):
    theirs, ours = pair(name)
    assert [n for n in names_of(theirs) if not hasattr(ours, n)] == []
    public = getattr(theirs, "__all__", ())
    assert set(public) <= set(ours.__all__ if public else ())


@MIRRORED
@pytest.mark.parametrize("name", NAMES)
def test_a_module_says_what_is_torchs_own(name):
    theirs, ours = pair(name)
    made = {n for n, v in vars(theirs).items() if getattr(v, "__module__", "") == theirs.__name__}
    classes = {n for n in made if inspect.isclass(getattr(theirs, n)) or inspect.isfunction(getattr(theirs, n))}
    taken = {n for n in classes if getattr(ours, n, None) is getattr(theirs, n)}
    assert taken == set(TORCHS_OWN.get(name, "").split())


def test_the_package_has_all_names_of_torchs():
    wanted = {n for n, v in vars(torch_dcp).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert wanted <= set(milepost.dcp.__all__)
    assert all(hasattr(milepost.dcp, n) for n in milepost.dcp.__all__)


def parameters(function):
    return [p for p in inspect.signature(function).parameters if p not in ("self", "args", "kwargs", "options")]


def methods(kind):
    names = ["__init__", *(n for n in dir(kind) if not n.startswith("_"))]
    return {n: getattr(kind, n) for n in names if inspect.isfunction(inspect.unwrap(getattr(kind, n, None)))}


@pytest.mark.parametrize("name", NAMES)
def test_functions_and_methods_have_the_parameters_of_torch(name):
    theirs, ours = pair(name)
    for public in getattr(theirs, "__all__", ()):
        their, our = getattr(theirs, public), getattr(ours, public)
        if inspect.isfunction(their) and public not in OTHER_PARAMETERS:
            wanted = parameters(their)
            assert parameters(our)[: len(wanted)] == wanted, public
        if inspect.isclass(their) and our is not their and public != "Stateful":
            for method, function in methods(their).items():
                wanted, full_name = parameters(function), f"{public}.{method}"
                if full_name not in OTHER_PARAMETERS:
                    assert parameters(getattr(our, method))[: len(wanted)] == wanted, full_name


def test_every_module_that_is_left_out_is_still_one_of_torchs():
    assert set(LEFT_OUT) <= {m.name for m in pkgutil.iter_modules(torch_dcp.__path__)}
