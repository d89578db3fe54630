"""The attention-pre megakernel's host side: a graph of calls becomes instructions.

    OpGraph -> stages -> tiles -> TaskGraph -> passes -> KernelPlan -> instruction tensor
    (op_graph) (stages) (tiling) (task_graph) (passes)  (plan)        (encode)

``graphs`` holds the graphs that ship, ``schedule`` the cost model and the queues, ``interpret``
runs an encoded plan on the CPU. Everything up to ``plan`` is pure Python.
"""
