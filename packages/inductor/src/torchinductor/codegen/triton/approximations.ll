; Functions of libdevice that are one instruction of the device, as libdevice defines them where results below the
; smallest normal number are zero. To read these takes no time; to read all of libdevice takes a fifth of a kernel's.

declare float @llvm.nvvm.div.approx.ftz.f(float, float)
declare float @llvm.nvvm.ex2.approx.ftz.f(float)
declare float @llvm.nvvm.rsqrt.approx.ftz.f(float)

define float @__nv_fast_expf(float %x) alwaysinline nounwind {
  %scaled = fmul float %x, 0x3FF7154760000000 ; 1 / log(2)
  %result = call float @llvm.nvvm.ex2.approx.ftz.f(float %scaled)
  ret float %result
}

define float @__nv_fast_fdividef(float %x, float %y) alwaysinline nounwind {
  %result = call float @llvm.nvvm.div.approx.ftz.f(float %x, float %y)
  ret float %result
}

define float @__nv_rsqrtf(float %x) alwaysinline nounwind {
  %result = call float @llvm.nvvm.rsqrt.approx.ftz.f(float %x)
  ret float %result
}
