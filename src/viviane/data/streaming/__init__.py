"""Streams: a Kafka topic as a data set for online training."""

from viviane.data.streaming.kafka import KafkaStream, StreamReader

__all__ = ["KafkaStream", "StreamReader"]
