"""Rows of the market: three providers that fit, a dearer fourth, and decoys."""

from __future__ import annotations

from typing import Any


def offer(provider: str, cloud_id: str, data_center: str, price: float, **more: Any) -> dict[str, Any]:
    """One row of the market; ``sim`` (never shown) says how its pods behave."""
    row = {
        "cloudId": cloud_id,
        "gpuType": "H100_80GB",
        "socket": "PCIe",
        "provider": provider,
        "region": "united_states",
        "dataCenter": data_center,
        "country": "US",
        "gpuCount": 1,
        "gpuMemory": 80,
        "disk": {"minCount": None, "defaultCount": 100, "maxCount": None, "pricePerUnit": None, "step": None},
        "sharedDisk": {},
        "vcpu": {"defaultCount": 26},
        "memory": {"defaultCount": 180},
        "internetSpeed": None,
        "interconnect": None,
        "interconnectType": None,
        "provisioningTime": None,
        "stockStatus": "Available",
        "security": "secure_cloud",
        "prices": {"onDemand": price, "communityPrice": None, "isVariable": None, "currency": "USD"},
        "images": ["ubuntu_22_cuda_12", "cuda_12_6_pytorch_2_7"],
        "isSpot": None,
        "prepaidTime": None,
        "sim": {},
    }
    return {**row, **more}


def market() -> list[dict[str, Any]]:
    """Three providers that fit, a dearer fourth, and rows that must not be taken."""
    return [
        offer("hyperstack", "n3-H100x1", "CANADA-1", 1.90),
        offer("hyperstack", "n3-H100x1", "NORWAY-1", 1.95),
        offer("crusoecloud", "h100.1x", "eu-iceland1-a", 2.10),
        offer("crusoecloud", "h100.1x", "us-east1-a", 2.20),
        offer("lambdalabs", "gpu_1x_h100", "us-east-1", 2.49),
        offer("lambdalabs", "gpu_1x_h100", "us-west-2", 2.60),
        offer("datacrunch", "1H100", "FIN-02", 2.90),
        offer("runpod", "NVIDIA H100", "US-KS-2", 1.20, stockStatus="Unavailable"),
        offer("vultr", "prepaid", "AMS", 0.90, prepaidTime=720),
        offer("massedcompute", "gpu_1x_h100", "us-central-3", 1.00, isSpot=True),
        offer("nebius", "cpu", "eu", 0.05, gpuType="CPU_NODE", gpuMemory=0),
        offer("scaleway", "euro", "PAR", 1.00, prices={"onDemand": 1.0, "communityPrice": None, "currency": "EUR"}),
        offer("oblivus", "old-image", "X", 1.00, images=["stable_diffusion"]),
    ]
