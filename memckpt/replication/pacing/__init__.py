"""When bytes may go, and which.

`pace` (what may be sent now), `governor` (what sending costs training), `cadence` (N: every record, or states).
"""
