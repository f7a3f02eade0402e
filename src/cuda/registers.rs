//! PTX with its registers and labels named so that it packs well: what is unrolled repeats itself then, and so does what kernels have in
//! common. The build script writes it so, before it packs; the crate reads it.

use std::collections::BTreeMap;

/// Registers and labels numbered in the order in which a function names them: packed texts are a third as long. What the driver makes
/// of it is the same to the byte.
#[allow(dead_code)] // but in the build script and tests
pub(crate) fn in_order(ptx: &str) -> String {
    let mut kinds = BTreeMap::<&str, BTreeMap<u32, usize>>::new();
    rewritten(ptx, |kind, number, declared| {
        if declared {
            kinds.insert(kind, BTreeMap::new());
        } else if kind.starts_with('$') {
            kinds.entry(kind).or_default();
        }
        // Special registers are not declared.
        let numbers = kinds.get_mut(kind)?;
        let count = numbers.len();
        let in_order = *numbers.entry(number.parse().ok()?).or_insert(count + 1);
        Some(in_order.to_string())
    })
}

/// Each by how many of its kind are newer, instead of by its number: `%r7` becomes `%r-1` where the newest before it was `%r8`, and `%r+1`
/// where that was `%r6`; so does the last number of `$L__BB0_7`.
#[allow(dead_code)] // but in the build script and tests
pub(crate) fn to_relative(ptx: &str) -> String {
    renumbered(ptx, |number, newest| {
        let number: u32 = number.parse().ok()?;
        let (sign, distance) = if number > newest { ('+', number - newest) } else { ('-', newest - number) };
        Some((number, format!("{sign}{distance}")))
    })
}

/// The same back.
pub(crate) fn to_absolute(text: &str) -> String {
    renumbered(text, |number, newest| {
        let (sign, distance) = number.split_at_checked(1)?;
        let distance = distance.parse().ok()?;
        let number = if sign == "+" { newest.checked_add(distance) } else { newest.checked_sub(distance) }?;
        Some((number, number.to_string()))
    })
}

/// With each number as `renumber` writes it, given how it is written and the highest of its kind before it. It answers the number,
/// too, or `None` where there is none, as in the names of special registers.
fn renumbered(text: &str, renumber: impl Fn(&str, u32) -> Option<(u32, String)>) -> String {
    let mut newest: Vec<(&str, u32)> = vec![];
    rewritten(text, |kind, number, _| {
        let at = newest.iter().position(|of| of.0 == kind).unwrap_or_else(|| {
            newest.push((kind, 0));
            newest.len() - 1
        });
        let (found, written) = renumber(number, newest[at].1)?;
        newest[at].1 = newest[at].1.max(found);
        Some(written)
    })
}

/// With the number of each register and label as `write` answers it, or as it was. It is given the name up to the number, the number with
/// its sign, if it has any, and whether the name is that of registers which are being declared.
fn rewritten<'a>(text: &'a str, mut write: impl FnMut(&'a str, &'a str, bool) -> Option<String>) -> String {
    let end_of = |text: &str, is_part: fn(char) -> bool| text.find(|c| !is_part(c)).unwrap_or(text.len());
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['%', '$']) {
        let (before, named) = rest.split_at(at);
        let end_of_kind = if let Some(register) = named.strip_prefix('%') {
            1 + end_of(register, |c| c.is_ascii_lowercase())
        } else {
            let label = &named[..1 + end_of(&named[1..], |c| c.is_ascii_alphanumeric() || c == '_')];
            label.rfind('_').map_or(1, |last| last + 1)
        };
        let (kind, behind) = named.split_at(end_of_kind);
        let sign = behind.starts_with(['+', '-']) as usize;
        let (number, behind) = behind.split_at(sign + end_of(&behind[sign..], |c| c.is_ascii_digit()));
        out.extend([before, kind]);
        match write(kind, number, behind.starts_with('<')) {
            Some(written) => out.push_str(&written),
            None => out.push_str(number),
        }
        rest = behind;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str =
        ".reg .b32 %r<9>;\nmov.u32 %r1,%tid.x;\nadd.s32 %r3,%r1,%r2;\nld.f32 %f1,[%rd59+204];\n@%p2 bra $L__BB0_9;\nbra $L;\n$L__BB0_8:\n%";

    #[test]
    fn there_and_back() {
        let relative = ".reg .b32 %r<9>;\nmov.u32 %r+1,%tid.x;\nadd.s32 %r+2,%r-2,%r-1;\nld.f32 %f+1,[%rd+59+204];\n@%p+2 bra $L__BB0_+9;\nbra $L;\n$L__BB0_-1:\n%";
        assert_eq!(to_relative(PTX), relative);
        assert_eq!(to_absolute(relative), PTX);
    }

    #[test]
    fn declared_registers_in_order_of_each_function() {
        let of_two = format!("{PTX}envreg2;\n.reg .b32 %r<8>;\nmov.u32 %r7,%r5;\nmov.u32 %r5,%r7;\n$L__BB1_5:");
        let in_order_ = ".reg .b32 %r<9>;\nmov.u32 %r1,%tid.x;\nadd.s32 %r2,%r1,%r3;\nld.f32 %f1,[%rd59+204];\n@%p2 bra $L__BB0_1;\nbra $L;\n$L__BB0_2:\n%envreg2;\n.reg .b32 %r<8>;\nmov.u32 %r1,%r2;\nmov.u32 %r2,%r1;\n$L__BB1_1:";
        assert_eq!(in_order(&of_two), in_order_);
    }
}
