"""Every public name of torch.distributed.checkpoint is here, in the same module, with the same parameters."""

import importlib
import inspect
import pkgutil

import pytest
import torch.distributed.checkpoint as torch_dcp

import milepost.dcp

LEFT_OUT = {
    "_experimental": "torch's next design, which changes from release to release",
    "_async_process_executor": "how torch's async_save runs",
    "_async_thread_executor": "how torch's async_save runs",
    "_hf_utils": "inside of torch's Hugging Face storage",
    "_pg_transport": "sends states between jobs; no checkpoint is involved",
}
UNDERSCORED = {
    "api": "_wrap_exception _is_wrapped_exception WRAPPED_EXCEPTION",
    "default_planner": "_EmptyStateDictLoadPlanner _validate_global_plan _create_default_local_metadata "
    "_check_box_overlap _check_box_bounds",
    "filesystem": "_write_item _StoragePrefix _StorageInfo _split_by_size_and_type _generate_uuid DEFAULT_SUFFIX "
    "_item_size _metadata_fn _OverlappingCpuLoader _SerialCpuLoader _TensorLoader",
    "planner_helpers": "_create_read_items _create_write_items _create_default_metadata_only_plan _init_state_dict "
    "_iterate_state_dict _compare_save_plans _merge_delta_local_plans _contains_usable_plan _create_chunk_list "
    "_create_chunk_from_tensor _create_chunk_from_dtensor _create_write_items_for_dtensor "
    "_create_write_item_for_tensor _create_write_item_for_bytesio _create_write_item_for_shard "
    "_create_read_item_for_tensor _create_read_item_for_byteio _chunk_for_shard _sharded_tensor_metadata",
    "resharding": "_check_shard_metadata_pair_overlap _shards_get_overlap_region_wrt_saved_tensor",
    "state_dict": "_patch_model_state_dict _patch_optimizer_state_dict",
    "state_dict_loader": "_load_state_dict _load_state_dict_from_keys",
    "state_dict_saver": "_save_state_dict _stateful_to_state_dict",
    "utils": "_DistWrapper _get_failure_dict _all_gather_keys _assert_same_keys _element_wise_add _element_wise_sub "
    "_ReaderView _create_file_view _normalize_device_info _profile _api_bc_check _find_shard _wrap_exception",
    "metadata": "STATE_DICT_TYPE STORAGE_TYPES _MEM_FORMAT_ENCODING",
    "_nested_dict": "flatten_state_dict unflatten_state_dict FLATTEN_MAPPING",
    "_traverse": "OBJ_PATH PATH_ITEM traverse_state_dict_v_2_3 STATE_DICT_ITEM CONTAINER_TYPE",
    "_storage_utils": "_storage_setup",
    "_checkpointer": "_Checkpointer",
    "_state_dict_stager": "StateDictStager",
    "_sharded_tensor_utils": "_flatten_sharded_tensors",
    "_version": "_derived_version",
    "logger": "_dcp_method_logger",
    "logging_handlers": "DCP_LOGGER_NAME",
}
OTHER_PARAMETERS = {}
NAMES = [m.name for m in pkgutil.iter_modules(torch_dcp.__path__) if m.name not in LEFT_OUT]


def pair(name):
    try:
        theirs = importlib.import_module(f"torch.distributed.checkpoint.{name}")
    except ImportError as error:
        pytest.skip(f"torch's needs {error.name}")
    return theirs, importlib.import_module(f"milepost.dcp.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_all_public_names_of_torchs(name):
    theirs, ours = pair(name)
    public = getattr(theirs, "__all__", ())
    wanted = [*public, *UNDERSCORED.get(name, "").split()]
    assert [n for n in wanted if not hasattr(ours, n)] == []
    assert set(public) <= set(ours.__all__ if public else ())


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
