"""Requests awaited, by tasks of one loop and by futures of other libraries."""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np
import pytest

import deepnvme


def test_await_gives_the_result(io, tmp_path, noise):
    data = noise(3_000_001)

    async def main() -> None:
        assert await io.write(tmp_path / "file", data) == data.size
        back = np.zeros_like(data)
        request = io.read(tmp_path / "file", back)
        assert await request == data.size
        assert await request == data.size  # again is harmless
        assert (back == data).all()

    asyncio.run(main())


def test_many_tasks_at_once(io, tmp_path, noise):
    async def round_trip(i: int) -> bool:
        data = np.full(100_001, i, np.uint8)
        await io.write(tmp_path / f"file{i}", data)
        back = np.zeros_like(data)
        await io.read(tmp_path / f"file{i}", back)
        return bool((back == i).all())

    async def main() -> list[bool]:
        return await asyncio.gather(*(round_trip(i) for i in range(100)))

    assert all(asyncio.run(main()))


def test_failure_is_raised_where_it_is_awaited(io):
    async def main() -> None:
        with pytest.raises(OSError, match="No space left"):
            await io.write("/dev/full", bytes(100))

    asyncio.run(main())


def test_swap_get_is_awaited_for_its_array(tmp_path):
    async def main() -> None:
        with deepnvme.Swap(tmp_path) as swap:
            await swap.put("a", np.arange(1000))
            assert ((await swap.get("a")).numpy() == np.arange(1000)).all()

    asyncio.run(main())


def test_cancelled_task_cancels_its_request(backend, tmp_path):
    async def main(io: deepnvme.Engine) -> deepnvme.Request:
        request = io.write(tmp_path / "file", deepnvme.empty(256 << 20))
        task = asyncio.ensure_future(awaiting(request))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return request

    async def awaiting(request: deepnvme.Request) -> int:
        return await request

    with deepnvme.Engine(backend, queue_depth=1, block_size="4KiB") as io:
        request = asyncio.run(main(io))
        with pytest.raises(concurrent.futures.CancelledError):
            request.wait()
        assert io.write(tmp_path / "other", b"x").wait() == 1


def test_loop_that_is_gone_is_no_problem(backend, tmp_path):
    async def main(io: deepnvme.Engine) -> None:
        request = io.write(tmp_path / "file", deepnvme.empty(64 << 20))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(awaiting(request))), 0.0)

    async def awaiting(request: deepnvme.Request) -> int:
        return await request

    with deepnvme.Engine(backend, queue_depth=1, block_size="4KiB") as io:
        asyncio.run(main(io))


def test_bridge_to_concurrent_futures(io, tmp_path):
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    io.write(tmp_path / "file", bytes(1000)).add_done_callback(lambda r: future.set_result(r.wait()))
    assert future.result(30) == 1000
