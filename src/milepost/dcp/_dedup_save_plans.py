"""What several ranks would write goes to one of them."""

from milepost.planning import dedup_save_plans

__all__ = ["dedup_save_plans"]
