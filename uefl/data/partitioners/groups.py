"""Keep groups together: every partitioner divides whole groups, such as patients, where a source has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.data.images import Images
from uefl.data.partitioners.leave_one_domain_out import get_named_domains
from uefl.data.partitioners.partition import Partition

if TYPE_CHECKING:
    from uefl.data.config import DataConfig

PartitionFunction = Callable[["DataConfig", Images, int], list[Partition]]
_LEAVE_ONE_OUT = "leave-one-domain-out"
_PAIRED = "leave-one-domain-out-paired"  # shows the same images in every domain by design


class GroupIndex(NamedTuple):
    """The groups of a source as numbers in the order of their first image."""

    ids: Tensor  # [n] group of every image
    first: Tensor  # [g] first image of every group
    sizes: Tensor  # [g]


def partition_groups(partition: PartitionFunction, config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Divide groups as if each were one image of its most frequent label, and return the images of the groups.

    A group that the source gives to several silos is in the same split of all of them.

    Sizes in the settings are numbers of images; a silo gets as many groups as have about that number.
    """
    groups = index_groups(config, images)
    if len(groups.first) == len(images.y):
        return _unify_splits(partition(config, images, seed), config, images)
    representatives = replace(
        images,
        x=images.x[:0],  # partitioners do not read pixels
        y=_find_most_frequent_labels(images, groups),
        is_test=images.is_test[groups.first],
        domain_ids=None if images.domain_ids is None else images.domain_ids[groups.first],
        silo_ids=None if images.silo_ids is None else images.silo_ids[groups.first],
        group_ids=None,
    )
    order = groups.ids.argsort(stable=True)
    members = torch.split(order, groups.sizes.tolist())

    def expand(indices: Tensor) -> Tensor:
        return torch.cat([order[:0], *(members[i] for i in indices.tolist())])

    partitions = partition(_count_groups(config, groups), representatives, seed)
    partitions = [Partition(p.silo, expand(p.train), expand(p.validation), expand(p.test)) for p in partitions]
    return _unify_splits(partitions, config, images)


def _unify_splits(partitions: list[Partition], config: DataConfig, images: Images) -> list[Partition]:
    """Move the images of each group to the split that its first silo drew; a split of the source itself comes first."""
    if config.partitioner == _PAIRED:
        return partitions
    assert images.group_ids is not None
    uses_source_splits = _uses_source_splits(config)
    keys = torch.stack([images.group_ids, images.is_test.long() * uses_source_splits], 1)
    _, ids = torch.unique(keys, dim=0, return_inverse=True)
    split_of_group = torch.full((int(ids.max()) + 1,), -1)
    for partition in sorted(partitions, key=lambda p: not (uses_source_splits and images.is_test[p.test].any())):
        for number, indices in enumerate(partition[1:]):
            members = ids[indices]
            split_of_group[members[split_of_group[members] < 0]] = number
    unified = []
    for silo, *splits in partitions:
        indices = torch.cat(splits)
        numbers = split_of_group[ids[indices]]
        unified.append(Partition(silo, *(indices[numbers == number] for number in range(len(splits)))))
        if len(splits[0]) and not len(unified[-1].train):
            raise InputError(f"silo {silo.name}: all its groups are held out in other silos; set another seed")
    return unified


def mark_groups_of_target(config: DataConfig, images: Images) -> Tensor:
    """Return which images of other domains [n] belong to a group of the domain that is left out."""
    none = torch.zeros(len(images.y), dtype=torch.bool)
    if images.group_ids is None or config.partitioner != _LEAVE_ONE_OUT or config.shifts:
        return none
    names, ids = get_named_domains(images)
    if config.target not in names:
        return none
    is_target = ids == names.index(config.target)
    return ~is_target & torch.isin(images.group_ids, images.group_ids[is_target])


def warn_groups_of_target(config: DataConfig, images: Images) -> list[str]:
    """Count the images that are not trained with because of their group."""
    count = int(mark_groups_of_target(config, images).sum())
    return [f"{count} examples of groups that occur in {config.target} are not trained with"] if count else []


def index_groups(config: DataConfig, images: Images) -> GroupIndex:
    """Number the groups; images of one group that the source itself gives to several silos or splits are separate."""
    assert images.group_ids is not None
    keys = [images.group_ids]
    owner_ids = images.silo_ids if config.partitioner == "natural" else images.domain_ids
    if owner_ids is None and not config.shifts:
        owner_ids = images.silo_ids
    if owner_ids is not None and (config.partitioner == "natural" or not config.shifts):
        keys.append(owner_ids)
    if _uses_source_splits(config):
        keys.append(images.is_test.long())
    _, ids = torch.unique(torch.stack(keys, 1), dim=0, return_inverse=True)
    return _order_by_first_image(ids)


def _uses_source_splits(config: DataConfig) -> bool:
    return not config.pool_splits and config.partitioner != _LEAVE_ONE_OUT  # which pools them


def _order_by_first_image(ids: Tensor) -> GroupIndex:
    n, count = len(ids), int(ids.max()) + 1
    first = torch.full((count,), n).scatter_reduce(0, ids, torch.arange(n), "amin")
    order = first.argsort()
    ids = order.argsort()[ids]
    return GroupIndex(ids, first[order], torch.bincount(ids, minlength=count))


def _find_most_frequent_labels(images: Images, groups: GroupIndex) -> Tensor:
    num_classes = len(images.classes)
    counts = torch.bincount(groups.ids * num_classes + images.y, minlength=len(groups.first) * num_classes)
    return counts.view(-1, num_classes).argmax(1)


def _count_groups(config: DataConfig, groups: GroupIndex) -> DataConfig:
    """Return the settings with numbers of groups in place of numbers of images."""
    mean_size = float(groups.sizes.double().mean())

    def convert(size: int) -> int:
        return max(1, int(size / mean_size)) if size else 0

    return replace(
        config,
        train_per_silo=convert(config.train_per_silo),
        test_per_silo=convert(config.test_per_silo),
        train_sizes=tuple(map(convert, config.train_sizes)),
    )
