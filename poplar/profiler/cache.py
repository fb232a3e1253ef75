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

from poplar.plan import Plan
from poplar.profile import ClusterProfile


def default_folder() -> Path:
    """`$POPLAR_CACHE`, or `poplar` in the user's cache folder."""
    chosen = os.environ.get("POPLAR_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "poplar"


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
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            _warn(path, str(error))
            return None
        try:
            document = json.loads(text)
            content = document["content"]
            if document["sha256"] != _checksum(content):
                _warn(path, "its checksum is wrong")
                return None
            profile = ClusterProfile.from_dict(content["profile"])
            plans = {key: Plan.from_dict(plan) for key, plan in content["plans"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _warn(path, f"{type(error).__name__}: {error}")
            return None
        if dict(profile.identity) != dict(identity):
            _warn(path, "its identity is that of another profile")
            return None
        return profile, plans

    def save(self, profile: ClusterProfile, plans: Mapping[str, Plan]) -> Path:
        """Write a profile for `load`, atomically."""
        content = {
            "profile": profile.to_dict(),
            "plans": {key: plan.to_dict() for key, plan in plans.items()},
        }
        document = {"sha256": _checksum(content), "content": content}
        path = self._path(profile.identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    def _path(self, identity: Mapping[str, str]) -> Path:
        key = hashlib.sha256(_canonical(dict(identity)).encode()).hexdigest()
        return self.folder / "profiles" / f"{key[:32]}.json"


def _warn(path: Path, why: str) -> None:
    warnings.warn(f"the cached profile {path} is not used: {why}; measuring again", stacklevel=2)


def _checksum(content: Any) -> str:
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
