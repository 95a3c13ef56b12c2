"""Where buckets are and where the TPU is: traffic between regions is slow, and costs money."""

from __future__ import annotations

from collections.abc import Iterable

from core import paths
from launch.doctor.rows import Row


def buckets(named: Iterable[str]) -> list[str]:
    """The buckets that paths name, each once."""
    remote = (name for name in named if paths.is_remote(name))
    return list(dict.fromkeys(name.removeprefix("gs://").split("/")[0] for name in remote))


def judge(bucket: str, *, zone: str | None, location: str | None = None) -> Row:
    """Holds the place of a bucket against a zone; `location` None asks for it."""
    name, where = "bucket region", location or paths.bucket_location(bucket)
    if zone is None or where is None:
        what = "where this TPU is" if zone is None else f"where gs://{bucket} is"
        return Row(name, True, f"nobody here can say {what}", "set TPU_ZONE" if zone is None else "", is_note=True)
    region, place = zone.rpartition("-")[0], where.lower()
    inside = place == region or (("-" not in place) and region.startswith(place))
    fix = f"copy what is read at every step into a bucket in {region}"
    return Row(name, inside, f"gs://{bucket} is in {place}, the TPU in {region}", fix)
