# SPDX-License-Identifier: Apache-2.0
"""`await job`: asyncio waits for the job's file descriptor."""
from __future__ import annotations

import asyncio
import os

from headrace._native import Job


async def settled(job: Job) -> None:
    """Waits until the job has settled; raises its error. A task that is cancelled while it waits cancels the job, and goes on only
    when nothing can write to the job's memory any more."""
    try:
        await _readable(job)
    except asyncio.CancelledError:
        job.cancel()
        # What cancels a second time has to wait too: the memory is not free before the job has settled.
        waiting = asyncio.ensure_future(_readable(job))
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                continue
        raise
    job.wait()


async def _readable(job: Job) -> None:
    """Until the job's descriptor is readable. It gets a duplicate to watch: several tasks may wait for one job."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    descriptor = os.dup(job.fileno())

    def tell() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        await done
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
