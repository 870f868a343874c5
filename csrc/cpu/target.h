// Code between ZI_TARGET_BEGIN("avx2,fma") and ZI_TARGET_END, headers included there too, is compiled for these instructions.
// It has internal linkage (unnamed namespaces), so that no other file calls it.

#pragma once

#define ZI_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ZI_TARGET_BEGIN(features) ZI_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define ZI_TARGET_END ZI_PRAGMA(clang attribute pop)
#else
#define ZI_TARGET_BEGIN(features) ZI_PRAGMA(GCC push_options) ZI_PRAGMA(GCC target(features))
#define ZI_TARGET_END ZI_PRAGMA(GCC pop_options)
#endif
