// Every kernel for one instruction set: compiled several times, with HF_SSM_ISA naming it and the flags that go with it.
#include "kernels.h"

#include "causal_conv1d.h"
#include "decay_rates.h"
#include "linear.h"
#include "quasiseparable.h"
#include "rms_norm.h"
#include "selective_scan.h"
#include "ssd.h"
#include "ssd_backward.h"

#define HF_SSM_JOIN(a, b) a##b
#define HF_SSM_TABLE(isa) HF_SSM_JOIN(kernels_, isa)
#define HF_SSM_STRING(a) #a
#define HF_SSM_NAME(isa) HF_SSM_STRING(isa)

namespace hf_ssm {

extern const Kernels HF_SSM_TABLE(HF_SSM_ISA) = {
    HF_SSM_NAME(HF_SSM_ISA),
    HF_SSM_ISA::lanes,
    HF_SSM_ISA::selective_scan,
    HF_SSM_ISA::selective_scan_backward,
    HF_SSM_ISA::linear,
    HF_SSM_ISA::decay_rates,
    HF_SSM_ISA::conv1d,
    HF_SSM_ISA::conv1d_backward,
    HF_SSM_ISA::ssd,
    HF_SSM_ISA::ssd_backward,
    HF_SSM_ISA::quasiseparable,
    HF_SSM_ISA::quasiseparable_backward,
    HF_SSM_ISA::rms_norm,
    HF_SSM_ISA::rms_norm_backward,
};

}  // namespace hf_ssm
