"""Traces through the page table: readers, replay, the offline optimum, reports. No torch."""
