"""Compares the regions of buckets and TPU: traffic between regions is slow and costs money."""

from __future__ import annotations

import re
from collections.abc import Iterable

from core import paths
from launch.findings import Finding

_MULTI_REGIONS = ("us", "eu", "asia")  # the regions in one begin with its name
_DUAL_REGIONS = {  # the predefined ones: https://cloud.google.com/storage/docs/locations
    "asia1": ("asia-northeast1", "asia-northeast2"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "nam4": ("us-central1", "us-east1"),
}
_REGION = re.compile(r"[a-z]+-[a-z]+\d+")


def buckets(named: Iterable[str]) -> list[str]:
    """The buckets that paths name, each once."""
    remote = (name for name in named if paths.is_remote(name))
    return list(dict.fromkeys(name.removeprefix("gs://").split("/")[0] for name in remote))


def judge(bucket: str, *, zone: str | None, location: str | None = None) -> Finding:
    """Holds the place of a bucket against a zone; `location` None asks for it."""
    name, where = "bucket region", location or paths.bucket_location(bucket)
    if zone is None or where is None:
        what = "where this TPU is" if zone is None else f"where gs://{bucket} is"
        return Finding(name, True, f"nobody here can say {what}", "set TPU_ZONE" if zone is None else "", is_note=True)
    region, place = zone.rpartition("-")[0], where.lower()
    fix = f"copy what is read at every step into a bucket in {region}"
    if place in _DUAL_REGIONS:
        both = " and ".join(_DUAL_REGIONS[place])
        said = f"gs://{bucket} is in {place} ({both}), the TPU in {region}"
        return Finding(name, region in _DUAL_REGIONS[place], said, fix)
    said = f"gs://{bucket} is in {place}, the TPU in {region}"
    if place in _MULTI_REGIONS:
        return Finding(name, region.startswith(place), said, fix)
    if not _REGION.fullmatch(place):  # two regions under a name of their own
        return Finding(name, True, f"{said}: which regions {place} has is not known here", is_note=True)
    return Finding(name, place == region, said, fix)
