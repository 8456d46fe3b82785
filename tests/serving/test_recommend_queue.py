"""Recommendations have threads and a queue of their own, which refuses early and never holds a model up."""

import json
import threading
import time

import pytest
from clients import Http

from viviane.serving import ModelEntry, RepositorySettings, SessionSettings
from viviane.serving.server import InferenceServer, RecommendSettings, ServerSettings

PATH = "/v1/recommenders/slow:recommend"
BODY = {"instances": [{"hist": [3]}]}


class Held:
    """A recommender that answers when it is let go."""

    def __init__(self) -> None:
        self.goes_on, self.running, self.calls = threading.Event(), threading.Semaphore(0), 0

    def columns(self) -> dict[str, object]:
        return {"inputs": []}

    def recommend(self, rows, k, *, keep_seen):
        self.calls += 1
        self.running.release()
        assert self.goes_on.wait(30)
        return [{"items": [1], "scores": [0.5]} for _ in rows]


@pytest.fixture
def served(models):
    entry = ModelEntry(name="ctr", path=str(models.path("deepfm")), session=SessionSettings(device="cpu"))
    settings = ServerSettings(
        http_port=0, grpc_port=None, max_rows=50, inference=RepositorySettings(models=(entry,)),
        recommend=RecommendSettings(threads=2, max_queued=2, max_queued_rows=40),
    )  # fmt: skip
    recommender = Held()
    with InferenceServer(settings, "1", {"slow": recommender}) as server:
        yield server, recommender
        recommender.goes_on.set()


def asked(server, bodies) -> tuple[list[threading.Thread], list[int]]:
    """Send requests from threads; returns the threads and the statuses as they come."""
    statuses: list[int] = []

    def ask(body) -> None:
        client = Http(server)
        statuses.append(client.post(PATH, body).status)
        client.close()

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads, statuses


def wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_excess_is_refused_unread_and_models_answer_meanwhile(served, raw) -> None:
    server, recommender = served
    threads, statuses = asked(server, [BODY] * 2)
    wait_for(lambda: recommender.calls == 2)  # before that all of four could count as waiting, and two be refused
    waiting, more_statuses = asked(server, [BODY] * 2)
    wait_for(lambda: server.service.under_way == 4 and server.service.queued("slow") == 2)
    client = Http(server)
    for body in (BODY, b"{not JSON", b"x" * 5000):  # none is looked at
        reply = client.post(PATH, body)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    answer = client.post("/v1/models/ctr:predict", {"instances": raw(2000 // 50)})  # all threads of `slow` are taken
    assert answer.status == 200
    assert client.get("/v1/recommenders/slow").status == 200
    assert client.post("/v1/recommenders/none:recommend", BODY).status == 404
    text = client.get("/metrics").body.decode()
    assert 'viviane_queued_requests{model="slow",version=""} 2.0' in text
    assert 'viviane_requests_total{code="UNAVAILABLE",model="slow",protocol="recommend"} 3.0' in text
    recommender.goes_on.set()
    for thread in threads + waiting:
        thread.join()
    assert statuses + more_statuses == [200] * 4
    assert client.post(PATH, BODY).status == 200
    assert server.service.queued("slow") == server.service.under_way == 0
    client.close()


def test_rows_that_wait_are_limited_and_a_free_thread_takes_any_request(served) -> None:
    server, recommender = served
    many = {"instances": [{"hist": [3]}] * 50}
    threads, statuses = asked(server, [many, many])  # more than may wait, but nobody waits
    wait_for(lambda: recommender.calls == 2)
    more, more_statuses = asked(server, [{"instances": [{"hist": [3]}] * 30}])
    wait_for(lambda: server.service.queued("slow") == 1)
    client = Http(server)
    reply = client.post(PATH, {"instances": [{"hist": [3]}] * 11})
    assert reply.status == 429
    assert "1 requests of 30 rows wait" in json.loads(reply.body)["error"]
    client.close()
    recommender.goes_on.set()
    for thread in threads + more:
        thread.join()
    assert statuses + more_statuses == [200] * 3


def test_a_client_that_leaves_the_queue_is_not_computed(served) -> None:
    import asyncio

    server, recommender = served
    queue = server.service.recommend_queue("slow")

    async def leave() -> None:
        tasks = [
            asyncio.create_task(queue.run(lambda: recommender.recommend([{}], 1, keep_seen=False), 1)) for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        assert queue.queued == 1
        tasks[2].cancel()
        await asyncio.sleep(0)
        assert queue.queued == 0
        recommender.goes_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    assert recommender.calls == 2


def test_an_error_of_a_recommender_is_counted_and_leaves_its_thread_free(served) -> None:
    server, recommender = served
    usual, recommender.recommend = recommender.recommend, lambda *_, **__: 1 / 0
    client = Http(server)
    for _ in range(5):
        assert client.post(PATH, BODY).status == 500
    recommender.recommend = usual
    recommender.goes_on.set()
    assert client.post(PATH, BODY).status == 200
    assert (
        'viviane_requests_total{code="INTERNAL",model="slow",protocol="recommend"} 5.0'
        in client.get("/metrics").body.decode()
    )
    client.close()
