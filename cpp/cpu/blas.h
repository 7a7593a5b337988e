// The BLAS that SciPy carries. Its functions arrive as pointers from scipy.linalg.cython_blas, so nothing is linked.

#ifndef JAX_GG_CPU_BLAS_H_
#define JAX_GG_CPU_BLAS_H_

#include <mutex>

namespace jax_gg::cpu {

// Fortran's xGEMM: op(A) op(B), column-major, every argument by reference.
template <typename T>
using GemmFunction = void(char* trans_a, char* trans_b, int* m, int* n, int* k, T* alpha, T* a, int* lda, T* b,
                          int* ldb, T* beta, T* c, int* ldc);

struct Blas {
  GemmFunction<float>* sgemm = nullptr;
  GemmFunction<double>* dgemm = nullptr;
  // OpenBLAS only: how many threads a product is divided among, in the whole process.
  int (*get_num_threads)() = nullptr;
  void (*set_num_threads)(int) = nullptr;
};

// Set once, by the module, before any handler is registered.
inline Blas& TheBlas() {
  static Blas blas;
  return blas;
}

inline GemmFunction<float>* GemmOf(float) { return TheBlas().sgemm; }
inline GemmFunction<double>* GemmOf(double) { return TheBlas().dgemm; }

// While one of these lives, each product stays on the thread that asks for it, where BLAS can be told so. Threads of
// BLAS's own, beside those that this library already runs on, would wait for each other whenever others use the cores.
class OneThreadPerProduct {
 public:
  OneThreadPerProduct() {
    if (!Controlled()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (alive_++ > 0) return;
    before_ = TheBlas().get_num_threads();
    TheBlas().set_num_threads(1);
  }

  ~OneThreadPerProduct() {
    if (!Controlled()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (--alive_ == 0) TheBlas().set_num_threads(before_);
  }

  OneThreadPerProduct(const OneThreadPerProduct&) = delete;
  OneThreadPerProduct& operator=(const OneThreadPerProduct&) = delete;

 private:
  static bool Controlled() { return TheBlas().get_num_threads != nullptr && TheBlas().set_num_threads != nullptr; }

  static inline std::mutex mutex_;
  static inline int alive_ = 0, before_ = 0;
};

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_BLAS_H_
