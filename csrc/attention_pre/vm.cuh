// The virtual machine of a resident CTA: instruction slots, pages, and the barriers between roles.
//
// Five kinds of synchronisation, one for each thing they protect:
//
//   instruction_arrived    a slot may be read               controller -> all roles
//   instruction_finished   a slot may be overwritten        all roles -> controller
//   page_full              a page holds its data            loaders -> math
//   page_free              a page may be overwritten        math -> loaders, page by page
//   event counters         another CTA's tile is readable   publisher -> input loaders
//
// Pages. Shared memory is two pools of 16 KiB pages, one for weights and one for inputs. A task
// body counts its pages from 0; the slot says which use of the pool its page 0 is (`weight_page`,
// `input_page`), and use u lies in physical page u % pool. Bodies consume and release pages in
// order, so this rotation is the whole logical-to-physical map. Each page is released alone: the
// next instruction's weights flow in while the current one computes. With two pools every loader
// waits for each of its pages in turn, so no barrier is ever looked at two phases early.
//
// Waits on other CTAs are bounded. A role that gives up raises `stop`: from then on waits on pages
// return at once, nothing is published, the controller ends the stream of instructions, and all
// roles meet at the end of the kernel.
#pragma once

#include "attention_pre/params.cuh"
#include "device/load.cuh"
#include "device/pdl.cuh"

namespace megamoe::attention {

inline constexpr uint32_t kMathWarps = 8, kMathThreads = 32 * kMathWarps, kThreads = 384;
inline constexpr uint32_t kControllerWarp = 8, kWeightWarp = 9, kInputWarp = 10,
                          kPublisherWarp = 11;
inline constexpr uint32_t kMathRegisters = 216, kOtherRegisters = 56;
inline constexpr int kMathBarrier = 1;  // named barrier; 0 is __syncthreads

#ifndef MEGAMOE_ATTENTION_SLOTS
#define MEGAMOE_ATTENTION_SLOTS 3
#endif
inline constexpr uint32_t kSlots = MEGAMOE_ATTENTION_SLOTS;
inline constexpr uint32_t kPageBytes = kTileRows * kBlockBytes;
#ifdef MEGAMOE_ATTENTION_STANDALONE  // csrc/cmp: a stage as a kernel of its own
inline constexpr bool kPaged = MEGAMOE_ATTENTION_WEIGHT_PAGES > 0;
inline constexpr uint32_t kInputPages = kPaged ? MEGAMOE_ATTENTION_INPUT_PAGES : 1;
inline constexpr uint32_t kWeightPages = kPaged ? MEGAMOE_ATTENTION_WEIGHT_PAGES : 1;
#else
// Wide bands fill an input page with one block of K, so they need more of them in flight. Narrow
// ones need two: the wgmmas in flight span no more.
#ifndef MEGAMOE_ATTENTION_NARROW_INPUT_PAGES
#define MEGAMOE_ATTENTION_NARROW_INPUT_PAGES 3
#endif
inline constexpr uint32_t kInputPages = max_band() <= 32 ? MEGAMOE_ATTENTION_NARROW_INPUT_PAGES : 5;
inline constexpr uint32_t kWeightPages = 13 - kInputPages;
#endif
inline constexpr uint32_t kMaxScales = max_scales();
// Tokens whose columns are gathered at once, and the pitch of a gathered row of 128 columns.
inline constexpr uint32_t kChunkTokens = 16, kPitch = kTileRows + 4;

// Entries of the block table that a slot holds: where a task of scores begins.
inline constexpr uint32_t kTableEntries = 32;

// In the opcode field of a slot: the stream has ended.
inline constexpr uint32_t kExit = 0xffffffffu;

struct Slot {
    Instruction inst;
    uint32_t weight_page, input_page;  // uses of the pools before this instruction
    uint32_t place;                    // in the queue
#ifdef MEGAMOE_ATTENTION_TRACE
    uint64_t* stamps;  // of this instruction
#endif
    uint32_t publish;  // whether the publisher signals: this task ends its unit
    uint32_t length;   // scores: keys of the request, and its first pages
    uint32_t table[kTableEntries];
    float w_scale[kMaxScales];  // [tile][block]
};

struct SharedStorage {
#ifdef MEGAMOE_ATTENTION_STANDALONE
    // No more than the kernel uses: what is left is room for its consumers. Rows are gathered where
    // weights were: all of them have been read, and none are on their way.
    using Body = Spec<0>;
    static constexpr bool kKeys = Body::kLoads == Loads::kKeys;
    static constexpr uint32_t kOnlyInputs =
        ceil_div(Body::kBlocks * Body::kRows * kBlockBytes, 1024u) * 1024;
    static constexpr uint32_t kInputBytes = !kPaged ? 16
                                            : kInputPages > 1 || kOnlyInputs > kPageBytes
                                                ? kPageBytes
                                                : kOnlyInputs;
    union {
        alignas(1024) uint8_t weights[kWeightPages][kPaged ? kPageBytes : 16];
        float gather[kChunkTokens][kPitch];
    };
    alignas(kPaged ? 1024 : 16) uint8_t inputs[kInputPages][kInputBytes];
    alignas(128) float key_scale[kKeys ? kWeightPages : 1][kTileRows];
    float input_scale[kInputPages][kTileRows];  // [block of the page][token]
#else
    alignas(1024) uint8_t weights[kWeightPages][kPageBytes];
    alignas(1024) uint8_t inputs[kInputPages][kPageBytes];
    alignas(16) float gather[kChunkTokens][kPitch];
    alignas(128) float key_scale[kWeightPages][kTileRows];
    float input_scale[kInputPages][kTileRows];  // [block of the page][token]
    alignas(128) uint64_t operands[kMaxOperandRows][kOperandSlots];
#endif
    Slot slot[kSlots];
    float2 sums[kMathWarps];
    uint32_t stop, last, epoch;
    uint64_t instruction_arrived[kSlots], instruction_finished[kSlots];
    uint64_t scales_ready[kSlots], inputs_ready[kSlots], tile_done[kSlots];
    uint64_t weight_full[kWeightPages], weight_free[kWeightPages];
    uint64_t input_full[kInputPages], input_free[kInputPages];
    uint64_t operands_ready;
};
static_assert(sizeof(SharedStorage) <= 232448, "a CTA has 227 KB");

MEGAMOE_DEVICE void init_pages(SharedStorage& s) {
    for (uint32_t i = 0; i < kWeightPages; ++i) {
        ptx::barrier_init(s.weight_full[i], 1);
        ptx::barrier_init(s.weight_free[i], kMathWarps);
    }
    for (uint32_t i = 0; i < kInputPages; ++i) {
        ptx::barrier_init(s.input_full[i], 2);  // bytes, and the scales' ordinary stores
        ptx::barrier_init(s.input_free[i], kMathWarps);
    }
}

// A position in the ring of slots.
struct Cursor {
    uint32_t slot = 0, phase = 0;
    MEGAMOE_DEVICE void advance() {
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Use `use` of a pool: its physical page and the phase of its barriers.
template <uint32_t kPages>
struct Page {
    uint32_t index, phase;
    MEGAMOE_DEVICE explicit Page(uint32_t use) : index(use % kPages), phase(use / kPages & 1) {}
    MEGAMOE_DEVICE void advance() {
        if (++index == kPages) {
            index = 0;
            phase ^= 1;
        }
    }
};
using WeightPage = Page<kWeightPages>;
using InputPage = Page<kInputPages>;

MEGAMOE_DEVICE bool stopped(const SharedStorage& s) {
    return *const_cast<const volatile uint32_t*>(&s.stop) != 0;
}

// For waits that end even after a stop: some role of this CTA is on its way to the barrier.
MEGAMOE_DEVICE void wait_always(uint64_t& bar, uint32_t phase) {
    while (!ptx::try_wait(bar, phase)) {
    }
}

// False after a stop. A page that math released after it saw the stop may still be in flight, so
// `stop` is looked at after the wait as well: whoever sees the release sees the stop.
MEGAMOE_DEVICE bool wait_page(const SharedStorage& s, uint64_t& bar, uint32_t phase) {
    while (!ptx::try_wait(bar, phase)) {
        if (stopped(s)) return false;
    }
    return !stopped(s);
}

// The same without an answer, for math: opaque to the compiler, so that it keeps wgmma results
// where they are. After a stop math goes on with whatever is in the page.
MEGAMOE_DEVICE void wait_or_stop(const SharedStorage& s, uint64_t& bar, uint32_t phase) {
    asm volatile(
        "{ .reg .pred done, go; .reg .b32 word;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni LEAVE;\n"
        "ld.volatile.shared.u32 word, [%2];\n"
        "setp.eq.u32 go, word, 0;\n"
        "@go bra.uni AGAIN;\n"
        "LEAVE: }" ::"r"(ptx::shared_address(&bar)),
        "r"(phase), "r"(ptx::shared_address(&s.stop))
        : "memory");
}

// A warp has finished reading what `bar` protects.
MEGAMOE_DEVICE void arrive_warp(uint64_t& bar) {
    __syncwarp();
    if (ptx::lane() == 0) ptx::arrive(bar);
}

// Times of an instruction: seen by the weight loader, events waited for, body begun, first operands
// of its main loop there, main loop done, results stored by math, and published.
enum class Stamp : uint32_t {
    kVisible,
    kInputsReady,
    kBegun,
    kLoaded,
    kSummed,
    kStored,
    kPublished,
    kCount
};

#ifdef MEGAMOE_ATTENTION_STANDALONE
MEGAMOE_DEVICE uint32_t cta_number() {
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}
#endif

// One lane.
MEGAMOE_DEVICE void stamp(const AttentionParams& p, const Slot& slot, Stamp what) {
#ifdef MEGAMOE_ATTENTION_TRACE
#ifdef MEGAMOE_ATTENTION_STANDALONE
    uint64_t* stamps = p.trace + uint64_t(cta_number()) * uint32_t(Stamp::kCount);
#else
    uint64_t* stamps = slot.stamps;
#endif
    stamps[uint32_t(what)] = ptx::now_ns();
#endif
}

#ifdef MEGAMOE_ATTENTION_STANDALONE
// Until what other kernels store may be read.
MEGAMOE_DEVICE void wait_producers() {
#ifndef MEGAMOE_CMP_NEVER_WAIT  // planted by a test
    ptx::grid_wait();
#endif
}
#endif

// One instruction, as the bodies see it. Operands are addressed by operand::<opcode>::<name>.
struct Task {
    const AttentionParams& p;
    SharedStorage& s;
    Slot& slot;
    uint32_t slot_index, phase;

#ifdef MEGAMOE_ATTENTION_STANDALONE
    // In registers and among the kernel's parameters: nothing is read before the loads that matter.
    const Instruction& task;
    const uint64_t* operands;
    MEGAMOE_DEVICE const Instruction& inst() const { return task; }
    template <class T>
    MEGAMOE_DEVICE T* operand(uint32_t index) const {
        return reinterpret_cast<T*>(operands[index]);
    }
    MEGAMOE_DEVICE uint32_t weight_page() const { return 0; }
    MEGAMOE_DEVICE uint32_t input_page() const { return 0; }
    MEGAMOE_DEVICE void wait_inputs() const { wait_producers(); }
    // A first kernel, too: whatever ran before the graph may still be running.
    MEGAMOE_DEVICE bool has_producers() const { return true; }
#else
    MEGAMOE_DEVICE const Instruction& inst() const { return slot.inst; }
    template <class T>
    MEGAMOE_DEVICE T* operand(uint32_t index) const {
        return reinterpret_cast<T*>(s.operands[inst().operand_row][index]);
    }
    MEGAMOE_DEVICE uint32_t weight_page() const { return slot.weight_page; }
    MEGAMOE_DEVICE uint32_t input_page() const { return slot.input_page; }
    MEGAMOE_DEVICE void wait_inputs() const { wait_always(s.inputs_ready[slot_index], phase); }
    MEGAMOE_DEVICE bool has_producers() const { return inst().wait_event[0] != kNoCounter; }
#endif
    MEGAMOE_DEVICE bool has(InstructionFlag flag) const { return inst().flags & flag; }
    MEGAMOE_DEVICE void stamp(Stamp what) const {
        if (threadIdx.x == 0) attention::stamp(p, slot, what);
    }
    MEGAMOE_DEVICE void wait_scales() const { wait_always(s.scales_ready[slot_index], phase); }
};

MEGAMOE_DEVICE uint32_t* counter(const AttentionParams& p, uint32_t index) {
    return p.counters + uint64_t(index) * kCounterStride;
}

// All math threads, after the last store of a part. True in the CTA whose part is the last of its
// unit: it sees what every part stored, and its task publishes.
MEGAMOE_DEVICE bool last_of_unit(const Task& t) {
    SharedStorage& s = t.s;
    ptx::named_barrier<kMathThreads>(kMathBarrier);
    if (threadIdx.x == 0) {
        bool last = false;
        if (!stopped(s)) {
            const uint32_t before =
                ptx::fetch_add_acq_rel_gpu(counter(t.p, t.inst().reduce_counter), 1);
            last = is_last_arrival(before, t.inst().reduce_total, s.epoch);
        }
        s.last = t.slot.publish = last;
    }
    ptx::named_barrier<kMathThreads>(kMathBarrier);
    return s.last;
}

}  // namespace megamoe::attention
