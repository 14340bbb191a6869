"""The session of an embedded driver, after its compile server has been forked (`embedded`)."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import NoReturn

from nnfmq.base import settings
from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.memory import Memory
from nnfmq.driver.devices.configuration import read_configuration
from nnfmq.driver.devices.installation import installed_plugins
from nnfmq.driver.devices.plugins import load_extensions
from nnfmq.driver.devices.registry import make_devices
from nnfmq.driver.process.statistics_area import StatisticsArea
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import Session, run_session
from nnfmq.engines.compiled.perf_map import open_perf_map
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.observe import statistics_layout as layout
from nnfmq.serialize import control_protocol, messages


def serve(channel: Channel) -> NoReturn:
    """Serve the client at the other end of `channel` until it exits. Never returns.

    If a setting or the devices' configuration is not valid, reject the client with the reason, and exit with status 1.
    """
    try:
        settings.check_all()
        plugins = installed_plugins()
        load_extensions(plugins)
        devices = make_devices(read_configuration(), plugins)
    except (InvalidArgument, OSError) as error:
        rejection = control_protocol.encode(messages.Refused(ErrorStatus.GENERAL_FAILURE, str(error)))
        with suppress(NnfmqError):  # the client may have exited
            channel.send(rejection, (), NO_WAIT)
        sys.exit(1)
    open_perf_map()
    gc.freeze()  # a collection during a burst need not look at what has been imported
    gc.enable()
    statistics = StatisticsArea(Memory.create(layout.PAGE_BYTES, layout.PAGE))  # until the process exits
    run_session(Session(channel, "embedded", HANDLERS, devices, statistics=(statistics, 0)))
