# SPDX-License-Identifier: Apache-2.0
"""`await job`: asyncio waits for the job's file descriptor."""
from __future__ import annotations

import asyncio

from headrace._native import Job


async def settled(job: Job) -> None:
    """Waits until the job has settled; raises its error. A task that is cancelled while it waits cancels the job, and goes on only
    when nothing can write to the job's memory any more."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    descriptor = job.fileno()

    def tell() -> None:
        loop.remove_reader(descriptor)
        if not done.done():
            done.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        await done
    except asyncio.CancelledError:
        loop.remove_reader(descriptor)
        job.cancel()
        await asyncio.shield(_settled_somehow(loop, job))
        raise
    job.wait()


async def _settled_somehow(loop: asyncio.AbstractEventLoop, job: Job) -> None:
    done = loop.create_future()
    descriptor = job.fileno()
    loop.add_reader(descriptor, lambda: done.done() or done.set_result(None))
    try:
        await done
    finally:
        loop.remove_reader(descriptor)
