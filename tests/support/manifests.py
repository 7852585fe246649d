"""The manifests in deploy/, and strict schemas of their kinds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
_SCHEMA = ROOT / "tests" / "data" / "manifests.schema.yaml"
FOLDERS = ("shared", "kubernetes", "kuberay")


class _OneMeaningLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{sorted(twice)} twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def parse_documents(text: str) -> list[dict[str, Any]]:
    """Returns the documents of a YAML file that are not empty."""
    return [one for one in yaml.load_all(text, _OneMeaningLoader) if one is not None]


@cache
def manifest_paths() -> tuple[Path, ...]:
    """Every manifest but the lists of kustomize."""
    found = (path for folder in FOLDERS for path in sorted((DEPLOY / folder).glob("*.yaml")))
    return tuple(path for path in found if path.name != "kustomization.yaml")


@cache
def manifests(*folders: str) -> tuple[dict[str, Any], ...]:
    """Every object of every manifest of some folders, by default of all."""
    return tuple(
        one
        for path in manifest_paths()
        if path.parent.name in (folders or FOLDERS)
        for one in parse_documents(path.read_text("utf-8"))
    )


def errors_of(manifest: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with an object, a field that its kind does not have included."""
    kind = f"{manifest.get('apiVersion')}/{manifest.get('kind')}"
    schemas = _schemas()
    if kind not in schemas["kinds"]:
        return [f"no schema of {kind}"]
    whole = {
        "$defs": schemas["$defs"],
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", *schemas["kinds"][kind]],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"$ref": "#/$defs/metadata"},
            **schemas["kinds"][kind],
        },
    }
    Draft202012Validator.check_schema(whole)
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(whole).iter_errors(manifest)
    ]


@cache
def _schemas() -> dict[str, Any]:
    (found,) = parse_documents(_SCHEMA.read_text("utf-8"))
    return found


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod template, wherever it stands."""

    folder: str
    owner: str
    template: Mapping[str, Any]

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        found: Mapping[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def component(self) -> str:
        """Which part of pdserve it is."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> Mapping[str, Any]:
        """Its spec."""
        found: Mapping[str, Any] = self.template["spec"]
        return found

    @property
    def container(self) -> Mapping[str, Any]:
        """Its only container."""
        (found,) = self.spec["containers"]
        return found  # type: ignore[no-any-return]

    @property
    def flags(self) -> Sequence[str]:
        """The arguments that are flags."""
        return [text for text in self.container.get("args", []) if text.startswith("--")]

    def flag(self, name: str) -> str | None:
        """Returns the value of a flag."""
        values = [text.partition("=")[2] for text in self.flags if text.split("=")[0] == name]
        return values[-1] if values else None


@cache
def pods() -> tuple[Pod, ...]:
    """Every pod template of every manifest."""
    return tuple(
        pod
        for folder in FOLDERS
        for manifest in manifests(folder)
        for pod in _pods_of(manifest, folder)
    )


def _pods_of(manifest: Mapping[str, Any], folder: str) -> Iterator[Pod]:
    owner = f"{manifest['kind']}/{manifest['metadata']['name']}"
    spec = manifest.get("spec", {})
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        yield Pod(folder=folder, owner=owner, template=spec["template"])
    if manifest["kind"] == "RayCluster":
        yield Pod(folder=folder, owner=f"{owner}/head", template=spec["headGroupSpec"]["template"])
        for group in spec["workerGroupSpecs"]:
            name = f"{owner}/{group['groupName']}"
            yield Pod(folder=folder, owner=name, template=group["template"])
