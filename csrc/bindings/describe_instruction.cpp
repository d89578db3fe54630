// Expands the lists of instruction.hpp into what Python reads instead of repeating it.

#include "bindings/describe_instruction.hpp"

#include "megamoe/instruction.hpp"

namespace nb = nanobind;

namespace megamoe {

nb::dict describe_instruction() {
    nb::dict fields;  // name -> (word, words)
#define X(name) fields[#name] = nb::make_tuple(offsetof(Instruction, name) / 4, 1);
    MEGAMOE_INSTRUCTION_SCALARS(X)
#undef X
#define X(name, words) fields[#name] = nb::make_tuple(offsetof(Instruction, name) / 4, words);
    MEGAMOE_INSTRUCTION_ARRAYS(X)
#undef X

    nb::dict flags;
#define X(constant, name, bit) flags[#name] = static_cast<uint32_t>(constant);
    MEGAMOE_INSTRUCTION_FLAGS(X)
#undef X

    nb::dict opcodes;
    nb::dict operands;
#define SLOT(name) slots[#name] = slots.size();
#define X(constant, name, OPERANDS)                               \
    {                                                             \
        opcodes[#name] = static_cast<uint32_t>(Opcode::constant); \
        nb::dict slots;                                           \
        OPERANDS(SLOT)                                            \
        operands[#name] = slots;                                  \
    }
    MEGAMOE_OPCODES(X)
#undef X
#undef SLOT

    nb::dict description;
    description["words"] = kInstructionWords;
    description["max_waits"] = kMaxWaits;
    description["max_signals"] = kMaxSignals;
    description["operand_slots"] = kOperandSlots;
    description["no_counter"] = kNoCounter;
    description["counter_stride"] = kCounterStride;
    description["fields"] = fields;
    description["flags"] = flags;
    description["opcodes"] = opcodes;
    description["operands"] = operands;
    return description;
}

}  // namespace megamoe
