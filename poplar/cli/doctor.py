"""`poplar doctor`: whether the ranks can train together."""

from __future__ import annotations

from poplar.cli.options import AsJson, Debug, Device
from poplar.cli.output import command_output


def doctor(device: Device = "auto", as_json: AsJson = False, debug: Debug = False) -> None:
    """Check versions, devices, kernels, transports and memory of all ranks.

    Under torchrun, all ranks are compared before their first collective. The exit code is 1 if
    there is a problem.
    """
    with command_output(as_json=as_json, debug=debug) as output:
        from poplar.cli.process_group import chosen_device
        from poplar.doctor import examine

        report = examine(chosen_device(device))
        output.document, output.failed = report.to_dict(), not report.ok
        output.show(str(report))
