"""Commands that inspect, repair and copy what a buffer stores."""
