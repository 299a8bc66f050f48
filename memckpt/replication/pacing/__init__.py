"""When bytes may go, and which.

`pace` (what may be sent now), `governor` (what sending costs training), `watermark` (what every node has, and N).
"""
