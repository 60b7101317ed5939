"""Attacks on values, which are not tensors: in the manifest, in the names of the tree, in a rank's private record."""

import base64
import json
from pathlib import Path
from typing import Any

from attacks.forge import (
    Attack,
    Corpus,
    add_value,
    forge_manifest,
    forge_private,
    make_good,
    nested,
    read_manifest,
    write_manifest_text,
)

corpus = Corpus()


def canary(folder: Path) -> Path:
    """The file that appears if something from a checkpoint is executed."""
    return folder.parent / "canary"


def payload(folder: Path) -> str:
    """A pickle that creates the canary when it is loaded, as base64."""
    code = f"cposix\nsystem\n(S'touch {canary(folder)}'\ntR."
    return base64.b64encode(code.encode()).decode()


@corpus.attack("use")
def pickle_as_a_value(folder: Path) -> None:
    """A pickle runs code when it is loaded; the reader did not opt in."""
    forge_manifest(folder, lambda r: add_value(r, {"pickle": payload(folder)}))


@corpus.attack("use")
def pickle_deep_inside_a_value(folder: Path) -> None:
    """The same, inside containers, where a careless decoder might forget the opt-in."""
    inner = {"tuple": [{"dict": [["a", {"set": [{"frozenset": [{"pickle": payload(folder)}]}]}]]}]}
    forge_manifest(folder, lambda r: add_value(r, inner))


@corpus.attack("use")
def pickle_as_a_name_in_the_tree(folder: Path) -> None:
    """Names of the tree are values too."""
    forge_manifest(folder, lambda r: add_value(r, 1, name={"pickle": payload(folder)}))


@corpus.attack("use")
def pickle_as_a_name_above_everything(folder: Path) -> None:
    """The same for the name of a container on the path to a stateful object."""

    def change(record: dict[str, Any]) -> None:
        record["tree"][1][1] = {"pickle": payload(folder)}

    forge_manifest(folder, change)


@corpus.attack("use")
def pickle_as_metadata(folder: Path) -> None:
    """Metadata is shown by tools that only list a checkpoint."""
    forge_manifest(folder, lambda r: r.update(metadata={"pickle": payload(folder)}))


@corpus.attack("use")
def pickle_as_a_private_value(folder: Path) -> None:
    """Private values are in the shard file, outside the manifest."""
    forge_private(folder, lambda r: r["values"][0].update(value={"pickle": payload(folder)}))


@corpus.attack("use")
def metadata_that_is_no_dict(folder: Path) -> None:
    """Metadata must be a dict."""
    forge_manifest(folder, lambda r: r.update(metadata={"tuple": [1, 2]}))


@corpus.attack("use")
def name_that_cannot_be_a_key(folder: Path) -> None:
    """A key of a dict that decodes to a list."""
    forge_manifest(folder, lambda r: add_value(r, 1, name={"list": [1]}))


@corpus.attack("use")
def name_that_is_no_value(folder: Path) -> None:
    """A key of a dict that the codec does not know."""
    forge_manifest(folder, lambda r: add_value(r, 1, name={"bogus": 1}))


@corpus.attack("open")
def two_children_of_one_name(folder: Path) -> None:
    """A dict that names one child twice: the second would hide the first."""
    forge_manifest(folder, lambda r: add_value(r, 8, name="step", key="evil"))


# What an open codec might turn into a call, or fail on. Each becomes an attack.
_SPELLINGS: dict[str, Any] = {
    "reduce_tuple": {"__reduce__": ["os.system", ["touch canary"]]},
    "reduce_ex": {"__reduce_ex__": ["builtins.eval", ["1"]]},
    "class_name": {"os.system": "touch canary"},
    "python_object": {"py/object": "subprocess.Popen", "args": ["touch", "canary"]},
    "python_reduce": {"py/reduce": [{"py/function": "os.system"}, {"py/tuple": ["touch canary"]}]},
    "yaml_tag": {"!!python/object/apply:os.system": ["touch canary"]},
    "torch_function": {"torch.load": "canary"},
    "torch_hub": {"torch.hub": "canary"},
    "callable": {"function": "os.system"},
    "factory_of_a_defaultdict": {"defaultdict": ["os.system", []]},
    "factory_that_is_a_list": {"defaultdict": [["list"], []]},
    "counter_that_is_a_string": {"Counter": "aab"},
    "no_field": {},
    "two_fields": {"list": [], "tuple": []},
    "bare_list": [1, 2, 3],
    "enum_that_was_not_passed": {"enum": ["Secret", "MEMBER"]},
    "enum_of_a_builtin": {"enum": ["os.system", "touch"]},
    "enum_named_by_a_list": {"enum": [["Color"], "RED"]},
    "enum_member_that_is_an_attribute": {"enum": ["Color", "__class__"]},
    "enum_member_that_is_a_method": {"enum": ["Color", "mro"]},
    "enum_as_a_dataclass": {"dataclass": ["Color", []]},
    "dataclass_that_was_not_passed": {"dataclass": ["Secret", []]},
    "dataclass_as_an_enum": {"enum": ["Point", "x"]},
    "dataclass_with_its_class": {"dataclass": ["Point", [["x", 1], ["y", 2], ["__class__", 3]]]},
    "dataclass_with_its_dict": {"dataclass": ["Point", [["__dict__", {"dict": []}], ["x", 1]]]},
    "dataclass_without_a_field": {"dataclass": ["Point", [["x", 1]]]},
    "dataclass_with_a_field_twice": {"dataclass": ["Point", [["x", 1], ["x", 2], ["y", 2]]]},
    "dataclass_with_fields_that_are_no_pairs": {"dataclass": ["Point", 7]},
    "namedtuple_of_numbers": {"namedtuple": [3, 4]},
    "namedtuple_called_class": {"namedtuple": ["class", [["a", {"bogus": 1}]]]},
    "int_that_is_no_number": {"int": "zz"},
    "int_of_a_list": {"int": [1]},
    "float_by_another_name": {"float": "1e999"},
    "float_of_a_list": {"float": [1]},
    "complex_of_a_huge_int": {"complex": [{"int": "0x" + "f" * 400}, 0]},
    "complex_of_text": {"complex": ["1", "2"]},
    "complex_of_one": {"complex": [1]},
    "bytes_that_are_not_base64": {"bytes": "*** not base64 ***"},
    "bytes_of_a_number": {"bytes": 7},
    "str_that_is_not_unicode": {"str": "//8="},
    "list_of_text": {"list": "abc"},
    "set_of_lists": {"set": [{"list": []}]},
    "dict_with_a_list_as_key": {"dict": [[{"list": []}, 1]]},
    "dict_of_single_items": {"dict": [[1]]},
    "dict_of_a_number": {"dict": 7},
    "numpy_object": {"numpy": ["object", "AAAAAAAAAAA="]},
    "numpy_void": {"numpy": ["V8", "AAAAAAAAAAA="]},
    "numpy_bfloat16": {"numpy": ["bfloat16", "AAA="]},
    "numpy_too_short": {"numpy": ["float64", "AA=="]},
    "numpy_empty": {"numpy": ["float64", ""]},
    "numpy_named_by_a_list": {"numpy": [["float32"], "AAAAAA=="]},
    "torch_dtype_that_is_a_function": {"torch.dtype": "load"},
    "torch_dtype_of_a_list": {"torch.dtype": []},
    "torch_size_too_large": {"torch.Size": [{"int": "0x" + "f" * 40}]},
    "torch_size_of_text": {"torch.Size": ["a"]},
    "torch_size_of_a_number": {"torch.Size": 3},
    "torch_device_of_another_world": {"torch.device": "evil:0"},
    "torch_device_by_number": {"torch.device": 0},
    "torch_device_of_a_list": {"torch.device": []},
    "torch_device_past_64_bits": {"torch.device": "cuda:99999999999999999999"},
}


def _add_spellings() -> None:
    for number, (name, value) in enumerate(_SPELLINGS.items()):

        def manifest(folder: Path, value: Any = value) -> None:
            forge_manifest(folder, lambda r: add_value(r, value))

        def private(folder: Path, value: Any = value) -> None:
            forge_private(folder, lambda r: r["values"][0].update(value=value))

        corpus.append(Attack(f"value_{name}", "Something that is not a value, or that names code.", "use", manifest))
        if number % 4 == 0:  # the same decoder, but another path for its errors
            corpus.append(Attack(f"private_{name}", "The same in a rank's private record.", "use", private))


_add_spellings()


@corpus.attack("nothing")
def namedtuple_with_code_as_names(folder: Path) -> None:
    """Python makes namedtuples by evaluating text. Odd names must not get into that text."""
    evil = f"x=__import__('os').system('touch {canary(folder)}')"
    fields = [[evil, 1], ["class", 2], ["__init__", 3], ["_", 4], ["a", 5], ["a", 6], ["x y", 7], ["", 8]]
    forge_manifest(folder, lambda r: add_value(r, {"namedtuple": [evil, fields]}))


@corpus.attack("nothing")
def namedtuple_in_the_tree_with_code_as_names(folder: Path) -> None:
    """The same for a container of the tree."""
    evil = f"x=__import__('os').system('touch {canary(folder)}')"

    def change(record: dict[str, Any]) -> None:
        record["tree"] += [[1, "evil", f"namedtuple:{evil}", ""], [2, evil, "value", "evil"]]
        record["values"].append({"key": "evil", "value": 1})

    forge_manifest(folder, change)


@corpus.attack("use")
def namedtuple_in_the_tree_called_class(folder: Path) -> None:
    """A keyword is an identifier, and still not a valid name of a class."""

    def change(record: dict[str, Any]) -> None:
        record["tree"] += [[1, "evil", "namedtuple:class", ""], [2, "def", "value", "evil"]]
        record["values"].append({"key": "evil", "value": 1})

    forge_manifest(folder, change)


@corpus.attack("open")
def defaultdict_with_code_as_factory(folder: Path) -> None:
    """A default factory is a function."""
    forge_manifest(folder, lambda r: r["tree"].append([1, "evil", "defaultdict:os.system", ""]))


def _nest(folder: Path, text: str) -> None:
    """Save the good checkpoint with a value given as JSON text, which `json` itself could not write."""
    make_good(folder)
    record = read_manifest(folder)
    add_value(record, "@@@")
    write_manifest_text(folder, json.dumps(record).replace('"@@@"', text).encode())


@corpus.attack("open")
def value_nested_100000_deep(folder: Path) -> None:
    """Recursion without bound ends the process."""
    _nest(folder, nested(100_000))


@corpus.attack("use")
def value_nested_400_deep(folder: Path) -> None:
    """Shallow enough for the JSON parser, too deep for a decoder in Python."""
    _nest(folder, nested(400))


@corpus.attack("use")
def value_nested_200_deep_in_dicts(folder: Path) -> None:
    """The same with more levels of JSON for each level of value."""
    _nest(folder, '{"dict": [["a", ' * 200 + "1" + "]]}" * 200)


@corpus.attack("use")
def no_value_nested_900_deep(folder: Path) -> None:
    """Something that is not a value, nested too deeply for the error message to show it."""
    _nest(folder, '{"bogus": ' + "[" * 900 + "]" * 900 + "}")


@corpus.attack("use")
def name_nested_400_deep(folder: Path) -> None:
    """The same as a name of the tree."""
    make_good(folder)
    record = read_manifest(folder)
    add_value(record, 1, name="@@@")
    write_manifest_text(folder, json.dumps(record).replace('"@@@"', nested(400, "tuple")).encode())


@corpus.attack("open")
def name_nested_100000_deep(folder: Path) -> None:
    """The same, deeper."""
    make_good(folder)
    record = read_manifest(folder)
    add_value(record, 1, name="@@@")
    write_manifest_text(folder, json.dumps(record).replace('"@@@"', nested(100_000, "tuple")).encode())


@corpus.attack("use")
def metadata_nested_400_deep(folder: Path) -> None:
    """The same as metadata, which is decoded when a checkpoint is listed."""
    make_good(folder)
    text = json.dumps({**read_manifest(folder), "metadata": "@@@"})
    write_manifest_text(folder, text.replace('"@@@"', nested(400)).encode())


@corpus.attack("open")
def metadata_nested_100000_deep(folder: Path) -> None:
    """The same, deeper."""
    make_good(folder)
    text = json.dumps({**read_manifest(folder), "metadata": "@@@"})
    write_manifest_text(folder, text.replace('"@@@"', nested(100_000)).encode())


@corpus.attack("nothing")
def list_of_300000_under_a_long_key(folder: Path) -> None:
    """If each item carried its full key, 300,000 items under a key of 100 kB would make 30 GB of text."""
    key = "k" * 100_000
    forge_manifest(folder, lambda r: add_value(r, {"list": [1] * 300_000}, name="evil", key=key))


@corpus.attack("nothing")
def dict_of_many_under_a_long_key(folder: Path) -> None:
    """The same for dicts, whose keys may be long themselves."""
    inner = {"dict": [["k" * 100_000, {"dict": [[i, i] for i in range(50_000)]}]]}
    forge_manifest(folder, lambda r: add_value(r, inner))


@corpus.attack("nothing")
def int_of_a_megabyte(folder: Path) -> None:
    """Converting long numbers to decimal text takes quadratic time, and Python refuses to."""
    forge_manifest(folder, lambda r: add_value(r, {"int": "0x" + "f" * 1_000_000}))


@corpus.attack("use")
def int_of_a_megabyte_where_a_value_is_refused(folder: Path) -> None:
    """The same, in a message that would show it."""
    value = {"dict": [[{"int": "0x" + "f" * 1_000_000}, {"bogus": "b" * 1_000_000}]]}
    forge_manifest(folder, lambda r: add_value(r, value))


@corpus.attack("nothing")
def value_that_hides_another_class(folder: Path) -> None:
    """A dict that looks like the codec's own notation stays a dict."""
    value = {"dict": [["pickle", payload(folder)], ["__class__", "os"]]}
    forge_manifest(folder, lambda r: add_value(r, value))


@corpus.attack("use")
def private_record_nested_100000_deep(folder: Path) -> None:
    """The private record is JSON too."""
    forge_private(folder, lambda r: json.dumps(r).replace('"value": 0', f'"value": {nested(100_000)}').encode())


@corpus.attack("use")
def private_record_nested_400_deep(folder: Path) -> None:
    """The values of the private record go through the same decoder."""
    forge_private(folder, lambda r: json.dumps(r).replace('"value": 0', f'"value": {nested(400)}').encode())


@corpus.attack("use")
def private_record_that_is_no_json(folder: Path) -> None:
    """The private record can be any bytes."""
    forge_private(folder, lambda _: b"\xff\xfe not json")


@corpus.attack("use")
def private_root_that_is_a_list(folder: Path) -> None:
    """The root of the record must be a dict from key to value."""
    forge_private(folder, lambda r: r.update(tree=[[0, None, "list", ""], *r["tree"][1:]]))


@corpus.attack("use")
def private_root_that_is_a_value(folder: Path) -> None:
    """The root of the record is a leaf, where the reader expects a dict."""
    forge_private(folder, lambda r: r.update(tree=[[0, None, "value", "mine.seed"]]))


@corpus.attack("use")
def private_key_that_is_missing(folder: Path) -> None:
    """The manifest promises a key that the record does not hold."""
    forge_private(folder, lambda r: r["tree"][1].__setitem__(1, "yours"))


@corpus.attack("use")
def private_tensor_that_is_called_a_value(folder: Path) -> None:
    """The tree calls a tensor a value."""
    forge_private(folder, lambda r: r["tree"][3].__setitem__(2, "value"))


@corpus.attack("use")
def private_value_that_is_called_a_tensor(folder: Path) -> None:
    """The tree calls a value a tensor."""
    forge_private(folder, lambda r: r["tree"][2].__setitem__(2, "tensor"))


@corpus.attack("use")
def private_value_inside_a_private_value(folder: Path) -> None:
    """A rank-private leaf inside a private record."""
    forge_private(folder, lambda r: r["tree"][2].__setitem__(2, "per_rank"))


@corpus.attack("use")
def private_tensor_of_absurd_size(folder: Path) -> None:
    """A private tensor far larger than its entry."""
    forge_private(folder, lambda r: r["tensors"][0].update(shape=[2**45]))


@corpus.attack("use")
def private_tensor_of_negative_size(folder: Path) -> None:
    """A private tensor of a size that no tensor has."""
    forge_private(folder, lambda r: r["tensors"][0].update(shape=[-5]))


@corpus.attack("use")
def private_tensor_of_an_unknown_dtype(folder: Path) -> None:
    """A dtype is looked up in torch by name."""
    forge_private(folder, lambda r: r["tensors"][0].update(dtype="load"))


@corpus.attack("use")
def private_tensor_that_numpy_does_not_know(folder: Path) -> None:
    """A bfloat16 tensor that claims to have been a numpy array."""
    forge_private(folder, lambda r: r["tensors"][0].update(dtype="bfloat16", shape=[10], kind="numpy"))


@corpus.attack("use")
def private_tensor_listed_100000_times(folder: Path) -> None:
    """One tensor that the record lists many times."""
    forge_private(folder, lambda r: r.update(tensors=r["tensors"] * 100_000))


@corpus.attack("use")
def private_tensor_that_takes_a_shared_one(folder: Path) -> None:
    """A private tensor whose name would lead to another entry of the file."""

    def change(record: dict[str, Any]) -> None:
        record["tensors"][0]["key"] = record["tree"][3][3] = "/../model.bias"

    forge_private(folder, change)
