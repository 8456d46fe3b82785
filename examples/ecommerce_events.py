"""Made-up events in the format of the e-commerce example: some users buy, some brands sell, evenings are better."""

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

BRANDS = ["apple", "samsung", "xiaomi", "huawei", "bosch", "", "lg", "sony"]  # "" is a product without brand
CATEGORIES = ["electronics.smartphone", "electronics.audio.headphone", "appliances.kitchen.washer", ""]
HEADER = "event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session\n"


def generate(file: Path, num_users: int, seed: int = 0) -> Path:
    """Write a month of events, in order of time; whether a cart is bought depends on user, brand and hour."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 1.5, num_users)
    appeal = rng.normal(0, 1.5, len(BRANDS))
    start = datetime(2019, 10, 1)
    lines: list[tuple[datetime, str]] = []
    for user in range(num_users):
        for visit in range(rng.integers(2, 15)):
            at = start + timedelta(seconds=int(rng.integers(0, 31 * 86_400)))
            session = f"{user:08x}-{visit:04x}"
            for product in rng.zipf(1.4, rng.integers(1, 4)) % 500:
                brand = int(product) % len(BRANDS)
                category = CATEGORIES[int(product) % len(CATEGORIES)]
                score = taste[user] + appeal[brand] + (0.8 if at.hour >= 18 else 0.0) - 0.5
                kinds = ["view"]
                if rng.random() < 0.7:
                    kinds += ["cart"] + (["purchase"] if rng.random() < 1 / (1 + np.exp(-score)) else [])
                for kind in kinds:
                    at += timedelta(seconds=int(rng.integers(5, 120)))
                    place = f"{1_000_000 + product},{2_000 + int(product) % 4},{category},{BRANDS[brand]}"
                    row = f"{at} UTC,{kind},{place},{10 + int(product) * 1.5:.2f},{500_000_000 + user},{session}\n"
                    lines.append((at, row))
    lines.sort()
    file.write_text(HEADER + "".join(row for _, row in lines))
    return file
