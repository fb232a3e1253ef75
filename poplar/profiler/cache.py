"""Stores profiles and verified plans in files, one per identity of a profile.

A file is used only if its checksum and its identity are right. Otherwise a warning names the file,
and the job is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.values.regular_files import read_regular
from poplar.values.schema import parse_json


def default_folder() -> Path | None:
    """`$POPLAR_CACHE`, or `poplar` in the user's cache folder; None for a user without a home."""
    chosen = os.environ.get("POPLAR_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "poplar"
    except RuntimeError:  # neither HOME nor an entry in the password database
        return None


@dataclass(frozen=True)
class Cache:
    """Profiles and the plans verified on them, in one folder."""

    folder: Path

    def load(self, identity: Mapping[str, str]) -> tuple[ClusterProfile, dict[str, Plan]] | None:
        """The profile of this identity and its verified plans by key; None if there is none.

        A file that is damaged or of another identity gives a warning and None.
        """
        path = self._path(identity)
        try:
            return _parsed(read_regular(path).decode(), identity)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # whatever the file has become, the job can be measured again
            why = f"{type(error).__name__}: {error}"
            text = f"the cached profile {path} is not used ({why}); measuring again"
            warnings.warn(text, stacklevel=2)
            return None

    def save(self, profile: ClusterProfile, plans: Mapping[str, Plan]) -> Path:
        """Write a profile for `load`, atomically."""
        content = {
            "profile": profile.to_dict(),
            "plans": {key: plan.to_dict() for key, plan in plans.items()},
        }
        path = self._path(profile.identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"sha256": _checksum(content), "content": content}, file)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return path

    def _path(self, identity: Mapping[str, str]) -> Path:
        return self.folder / "profiles" / f"{_checksum(dict(identity))[:32]}.json"


def _parsed(text: str, identity: Mapping[str, str]) -> tuple[ClusterProfile, dict[str, Plan]]:
    document = parse_json(text)
    content = document["content"]
    if document["sha256"] != _checksum(content):
        raise ValueError("its checksum is wrong")
    profile = ClusterProfile.from_dict(content["profile"])
    if profile.identity != identity:
        raise ValueError("its identity is that of another profile")
    return profile, {key: Plan.from_dict(plan) for key, plan in content["plans"].items()}


def _checksum(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
