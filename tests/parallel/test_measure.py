"""Speeds of a machine are measured once for a group of processes and a device, not for every model."""

import torch

from viviane.parallel import Group, measure

CPU = torch.device("cpu")


class OtherProcesses:
    """A group of torch.distributed, of which the measurements are replaced."""


class FakeGroup(Group):
    def __init__(self, device_group: OtherProcesses) -> None:
        super().__init__()
        self.given, self.size = device_group, 2

    @property
    def device_group(self):
        return self.given

    def gather_data(self, own):
        return [own, own]


def test_a_group_is_measured_once_for_each_device_and_a_new_group_again(monkeypatch):
    copies, links = [], []
    monkeypatch.setattr(measure, "copy_gb_per_s", lambda device: copies.append(device) or 9.0)
    monkeypatch.setattr(measure, "_exchange_gb_per_s", lambda group, device: links.append(group.given) or 3.0)
    first, second = OtherProcesses(), OtherProcesses()
    found = [measure.measure_machine(FakeGroup(one), CPU) for one in (first, first, second, second, first)]
    assert links == [first, second]
    assert copies == [CPU, CPU]
    assert all(one == found[0] for one in found)
    assert found[0].memory_bytes > 0
    links.clear()
    del first
    measure.measure_machine(FakeGroup(OtherProcesses()), CPU)  # perhaps where the first one lay in memory
    assert len(links) == 1


def test_a_process_alone_is_measured_once(monkeypatch):
    copies = []
    monkeypatch.setattr(measure, "_measured_alone", {})
    monkeypatch.setattr(measure, "copy_gb_per_s", lambda device: copies.append(device) or 9.0)
    assert measure.measure_machine(Group(), CPU) is measure.measure_machine(Group(), CPU)
    assert copies == [CPU]
