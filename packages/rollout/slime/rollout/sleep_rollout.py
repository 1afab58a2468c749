"""Compatibility: `--rollout-function-path slime.rollout.sleep_rollout.sleep`, which waits until the run is stopped.

With everything started and nothing running, engines and services can be measured by hand.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from slime.rollout.calls.call import CALL
from slime.types.errors import DeadlineExceeded

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

log = logging.getLogger(__name__)


def sleep(args: RolloutArgs, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Sleeps, under the contract of `--rollout-function-path`; raises DeadlineExceeded once its call is over."""
    call = CALL.get()
    log.info("rollout %s sleeps until the run is stopped", rollout_id)
    (threading.Event() if call is None else call.cancelled).wait()
    raise DeadlineExceeded(f"rollout {rollout_id} slept until its call was over", field="rollout_id", value=rollout_id)
