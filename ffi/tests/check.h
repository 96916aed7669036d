// Checks for the native tests: one program a test file, whose main() ends with 0 when all of them held.
//
// A failed check prints file, line and what was compared, and ends the program with status 1. Checks stay on
// in every build type. Thread contract: may be used from any thread; the first failure ends the process at
// once.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <type_traits>

// Defined where a sanitizer is on, under which long tests take a subset.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define JMO_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define JMO_SANITIZED 1
#endif
#endif

namespace jmo_test {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // no destructors: other threads may still be at work
}

template <typename T>
void show(std::ostream& out, const T& value) {
  if constexpr (std::is_integral_v<T>) {
    out << +value;  // bytes as numbers
  } else if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else {
    out << value;
  }
}

template <typename A, typename B>
std::string both(const char* text, const A& a, const B& b) {
  std::ostringstream out;
  out << text << " (";
  show(out, a);
  out << " vs. ";
  show(out, b);
  out << ")";
  return out.str();
}

}  // namespace jmo_test

#define CHECK(cond)                                           \
  do {                                                        \
    if (!(cond)) ::jmo_test::fail(__FILE__, __LINE__, #cond); \
  } while (0)

// Both sides are evaluated once and must be numbers, enums, pointers or strings.
#define CHECK_EQ(a, b)                                                                          \
  do {                                                                                          \
    const auto check_a_ = (a);                                                                  \
    const auto check_b_ = (b);                                                                  \
    if (!(check_a_ == check_b_))                                                                \
      ::jmo_test::fail(__FILE__, __LINE__, ::jmo_test::both(#a " == " #b, check_a_, check_b_)); \
  } while (0)
