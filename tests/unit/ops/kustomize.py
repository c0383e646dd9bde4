"""As much of kustomize as our manifests use: resources, components, JSON patches on one object, namespace, images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "components", "patches", "images"}
_CLUSTER_WIDE = {"Namespace"}


def build(folder: Path) -> list[Manifest]:
    """The objects of a kustomization. Whatever is not known here fails, so that nothing is left out silently."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(plan) <= _KNOWN, f"{folder}: {set(plan) - _KNOWN}"
    objects = [found for name in plan.get("resources", []) for found in _resource(folder / name)]
    for name in plan.get("components", []):
        component = yaml.safe_load((folder / name / "kustomization.yaml").read_text())
        assert component["kind"] == "Component"
        _patch_all(objects, folder / name, component["patches"])
    _patch_all(objects, folder, plan.get("patches", []))
    for found in objects:
        if "namespace" in plan and found["kind"] not in _CLUSTER_WIDE:
            found["metadata"]["namespace"] = plan["namespace"]
        for image in plan.get("images", []):
            _rename(found, image)
    return objects


def _resource(path: Path) -> list[Manifest]:
    return build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))


def _patch_all(objects: list[Manifest], folder: Path, patches: list[dict[str, Any]]) -> None:
    for patch in patches:
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
        assert len(found) == 1, f"{folder}: a patch for {kind} {name}, of which there are {len(found)}"
        for step in yaml.safe_load((folder / patch["path"]).read_text()):
            _apply(found[0], step)


def _apply(target: Any, step: dict[str, Any]) -> None:
    """One operation of a JSON patch (RFC 6902): add or replace."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    value = copy.deepcopy(step["value"])
    if isinstance(target, list):
        assert step["op"] == "add", step
        assert last == "-", step
        target.append(value)
        return
    assert step["op"] == "add" or (step["op"] == "replace" and last in target), step
    target[last] = value


def _rename(found: Manifest, image: dict[str, str]) -> None:
    pod = found.get("spec", {}).get("template", {}).get("spec", {})
    for container in pod.get("containers", []):
        if container["image"].partition(":")[0] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"
